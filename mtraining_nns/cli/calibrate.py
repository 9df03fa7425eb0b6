"""Measure what this machine does, for `mtraining plan --constants FILE`.

    mtraining calibrate --out measured.yaml
    torchrun --nproc-per-node 2 -m mtraining_nns.cli calibrate --out measured.yaml       links between GPUs, too

Products, attention, index, copies, and a real training step of a few layers on one GPU; with two ranks and more the
links between them instead of the step. One file holds what one run measured; --update FILE keeps the measured numbers
of another run. What was not measured is marked as assumed. Minutes on a GPU, seconds on a CPU, whose numbers only show
that it works.
"""


def add_parser(verbs) -> None:
    """Declare the verb and its arguments."""
    parser = verbs.add_parser("calibrate", help="measure this machine for mtraining plan")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the numbers go, YAML")
    parser.add_argument(
        "--update", metavar="FILE", help="of another run: its measured numbers stay where this has none"
    )


def run(args) -> None:
    """Measure, print, write."""
    import os
    from dataclasses import replace

    from mtraining_nns.errors import UserError

    folder = os.path.dirname(os.path.abspath(args.out))
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is no folder; make it or give another --out")
    from mtraining_nns.plan.constants import Constants

    before = Constants.load(args.update).numbers if args.update else {}
    from mtraining_nns.engines.world import start
    from mtraining_nns.environment import Process, prepare_caches
    from mtraining_nns.plan.calibration import Calibration
    from mtraining_nns.sections import ParallelConfig
    from mtraining_nns.tables import align

    prepare_caches()
    ranks = (Process.launched() or Process()).world
    with start(ParallelConfig(cp=1, dp=ranks)) as world:
        calibration = Calibration(world)
        found = calibration.run()
        measured = {name: number for name, number in before.items() if number.how == "measured"}
        stays = {name: number for name, number in measured.items() if found.numbers[name].how != "measured"}
        if world.rank == 0:
            replace(found, numbers=found.numbers | stays).save(args.out)
            print(f"{found.gpu}, {ranks} rank{'s' if ranks > 1 else ''}")
            print(align(calibration.rows))
            print(f"wrote {args.out}; use it with: mtraining plan RECIPE --constants {args.out}")
