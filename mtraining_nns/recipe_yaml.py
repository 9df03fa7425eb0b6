"""The YAML border of a recipe: text to a tree, overrides, the tree to dataclasses with every key and type checked.

    read("recipes/demo.yaml") -> {"train": {"lr": "1e-3", ...}, ...}
    override(tree, "train.lr=2e-3")
    build(Recipe, tree)         an unknown key names its nearest neighbours, a wrong type names key, got and expected

Types come from the dataclasses' hints. YAML has no tuples: a list becomes one where a hint asks.
"""

import difflib
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass

import yaml

from mtraining_nns.errors import UserError
from mtraining_nns.ops.config import AttentionConfig


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, which YAML 1.1 takes for text, and refuses a key that is given twice."""

    def construct_mapping(self, node, deep=False):
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            problem = f"given twice: {', '.join(map(str, twice))}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+0123456789"))


def read(path: str) -> dict:
    """The tree of a YAML file; raises UserError for a missing file, bad YAML or a file that is no mapping."""
    try:
        with open(path, encoding="utf-8") as stream:
            tree = yaml.load(stream, _Loader)
    except OSError as error:
        raise UserError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2020-13-45 is a ValueError
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold sections such as model: and train:, got {type(tree).__name__}")
    return tree


def override(tree: dict, text: str) -> None:
    """Apply one `section.key=value` in place; the value is YAML; `model.init.head_dim=64` works too.

    A key with dots that is there already is meant whole: `data.mix.data/v1.5/books=0.3`.
    """
    path, equals, value = text.partition("=")
    *parents, last = path.split(".")
    if not equals or not parents or not all([*parents, last]):
        raise UserError(f"override {text!r} must look like section.key=value, for example train.steps=20")
    while parents:
        whole = ".".join([*parents, last])
        if whole in tree:
            last = whole
            break
        name = parents.pop(0)
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise UserError(f"override {text!r} reaches into {name}, which is no section but {tree!r}")
    try:
        tree[last] = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"override {text!r} has a value that is not YAML: {' '.join(str(error).split())}") from error


def build(cls: type, tree: dict, prefix: str = ""):
    """An instance of the dataclass `cls`, sections built in turn; raises UserError, also for a section's ValueError."""
    if not isinstance(tree, dict):
        raise UserError(f"{prefix or 'the recipe'} must be a section with keys, got {tree!r}")
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in hints:
            raise UserError(f"unknown key {_join(prefix, name)}; {_nearest(str(name), hints)}")
    values = {}
    for field in fields(cls):
        key = _join(prefix, field.name)
        if is_dataclass(hints[field.name]):
            section = tree.get(field.name)
            values[field.name] = build(hints[field.name], {} if section is None else section, key)
        elif field.name in tree:
            values[field.name] = convert(tree[field.name], hints[field.name], key)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"the recipe lacks {key} ({_words(hints[field.name])}); add it or give {key}=...")
    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def attention(words: list[str], verb: str) -> AttentionConfig:
    """The settings that `attention.key=value` words of a command line mean; UserError for others."""
    tree = {"attention": {}}
    for word in words:
        if not word.startswith("attention."):
            raise UserError(f"{verb} takes attention.key=value, got {word!r}; give e.g. attention.p_v=0.9")
        override(tree, word)
    return build(AttentionConfig, tree["attention"], "attention")


def convert(value, hint, key: str):
    """`value` as the type `hint` asks, or a UserError that names key, got and expected.

    >>> convert(1, float, "train.lr"), convert([0, 1], tuple[int, ...], "attention.dense_layers")
    (1.0, (0, 1))
    """
    for option in typing.get_args(hint) if _is_union(hint) else (hint,):
        try:
            return _as(value, option)
        except (TypeError, ValueError):
            continue
    raise UserError(f"{key} must be {_words(hint)}, got {value!r} ({type(value).__name__})")


def dump(tree: dict) -> str:
    """YAML of plain values, keys in their order, tuples as lists."""
    return yaml.safe_dump(_plain(tree), sort_keys=False)


def _as(value, hint):
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        matches = [option for option in args if option == value and type(option) is type(value)]
        return matches[0] if matches else _mismatch()
    if origin is tuple:
        members = list(value) if isinstance(value, (list, tuple)) else _mismatch()
        kinds = [args[0]] * len(members) if args[-1] is Ellipsis else args
        return tuple(_as(member, kind) for member, kind in zip(members, kinds, strict=True))
    if origin is dict:
        members = value.items() if isinstance(value, dict) else _mismatch()
        return {_as(name, args[0]): _as(member, args[1]) for name, member in members}
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _mismatch()


def _is_union(hint) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _mismatch():
    raise TypeError


def _words(hint) -> str:
    if _is_union(hint):
        return " or ".join(_words(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        options = [str(option) for option in typing.get_args(hint)]
        return f"one of {', '.join(options)}" if len(options) > 1 else options[0]
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{args[0].__name__}"
    if typing.get_origin(hint) is dict:
        kinds = [arg.__name__ for arg in typing.get_args(hint)]
        return f"a mapping of {kinds[0]} to {kinds[1]}"
    return {type(None): "null", dict: "a mapping"}.get(hint, hint.__name__)


def _nearest(name: str, known) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"the keys here are {', '.join(known)}"


def _join(prefix: str, name) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
