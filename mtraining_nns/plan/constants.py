"""What one kind of GPU does, as numbers with their sources: packaged in `gpus/`, or written by `mtraining calibrate`.

constants = Constants.of("h200")
constants["matmul_tflops"], constants.assumed
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import yaml

from mtraining_nns.errors import UserError

FOLDER = Path(__file__).parent / "gpus"
HOW = ("measured", "assumed")
FORMAT = "  {}: {{value: {}, how: {}, source: {}}}"


class Number(NamedTuple):
    """A value, whether it was measured or assumed, and where it comes from."""

    value: float
    how: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Numbers of a kind of GPU by name; units are in the names, TFLOP/s and GB/s are decimal.

    gpu: its name; match: part of the name that torch gives it; capability: of CUDA; gpus_per_node: of its machines.
    """

    gpu: str
    match: str
    capability: tuple[int, int]
    gpus_per_node: int
    numbers: dict[str, Number]

    @classmethod
    def of(cls, kind: str) -> "Constants":
        """The packaged numbers of a kind of GPU; UserError for an unknown one."""
        if kind not in kinds():
            raise UserError(
                f"--gpu knows {', '.join(kinds())}, got {kind!r}; measure yours with mtraining calibrate and give"
                " --constants FILE"
            )
        return cls.load(FOLDER / f"{kind}.yaml")

    @classmethod
    def load(cls, path: str | Path) -> "Constants":
        """Read and check a file. UserError for one that is missing, broken or incomplete."""
        try:
            tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            numbers = {name: _number(name, entry) for name, entry in tree["numbers"].items()}
            found = cls(
                gpu=str(tree["gpu"]),
                match=str(tree["match"]),
                capability=tuple(map(int, tree["capability"])),
                gpus_per_node=int(tree["gpus_per_node"]),
                numbers=numbers,
            )
        except OSError as error:
            raise UserError(
                f"constants {path} cannot be read ({error.strerror}); give a file of mtraining calibrate"
            ) from error
        except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise UserError(f"constants {path}: {reason}; write it again with mtraining calibrate") from error
        if found.gpus_per_node < 1 or len(found.capability) != 2:
            raise UserError(f"constants {path}: expected gpus_per_node from 1 and a capability such as [9, 0]")
        return found

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads. UserError where that cannot be."""
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "numbers"}
        head["capability"] = list(self.capability)
        lines = [yaml.safe_dump(head, sort_keys=False).rstrip(), "numbers:"]
        for name, number in self.numbers.items():
            plain = yaml.safe_dump(number.source, default_style='"', width=1 << 20).strip()
            lines.append(FORMAT.format(name, f"{number.value:.6g}", number.how, plain))
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}); choose another --out") from error

    def __getitem__(self, name: str) -> float:
        """The value of a number; UserError where the file has none."""
        if name not in self.numbers:
            raise UserError(f"the constants of {self.gpu} have no {name}; add it to the file, or calibrate again")
        return self.numbers[name].value

    @property
    def assumed(self) -> list[str]:
        """Names of the numbers that nobody measured."""
        return [name for name, number in self.numbers.items() if number.how == "assumed"]

    def as_dict(self) -> dict:
        """Plain values."""
        numbers = {name: number._asdict() for name, number in self.numbers.items()}
        return {**asdict(self), "capability": list(self.capability), "numbers": numbers}


def kinds() -> list[str]:
    """Kinds of GPU that are packaged."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def of_device(name: str) -> Constants | None:
    """The packaged numbers of a device by the name that torch gives it, None where there are none."""
    return next((found for found in map(Constants.of, kinds()) if found.match in name), None)


def _number(name: str, entry: dict) -> Number:
    value, how, source = float(entry["value"]), entry["how"], str(entry["source"])
    if how not in HOW or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number from 0, measured or assumed, got {value}, {how}")
    return Number(value, how, source)
