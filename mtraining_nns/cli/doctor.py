"""Print versions, devices, optional packages, and what `auto` resolves to on this machine, with the reasons.

mtraining doctor
torchrun --nproc-per-node 8 -m mtraining_nns.cli doctor      as a launched process sees it; rank 0 prints
"""


def add_parser(verbs) -> None:
    """Declare the verb; it has no arguments."""
    verbs.add_parser("doctor", help="say what this machine has, what will run and why")


def run(args) -> None:
    """Print the report, once if there are several processes."""
    from mtraining_nns import doctor, environment

    process = environment.Process.launched()
    if process is None or process.rank == 0:
        print(doctor.report())
