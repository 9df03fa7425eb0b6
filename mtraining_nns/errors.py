"""The one exception for what a user got wrong: a recipe, an argument, a file, a missing package."""


class UserError(ValueError):
    """A mistake that the user can mend; its text is one line with what was got, what is expected and the fix.

    Every verb prints it as `mtraining: error: <text>` and exits with `exit_code`, without a traceback.
    """

    exit_code = 2
