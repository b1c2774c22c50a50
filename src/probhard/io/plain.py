"""Plain values from YAML files, with limits on size, depth and repetition.

Short files can describe huge values: aliases of aliases grow exponentially, deep nesting exhausts the stack, and
numbers of many digits take quadratic time. Configurations need none of that, so such files are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probhard.errors import ParameterError

LARGEST = 1_000_000  # bytes of a file
DEEPEST = 30  # nested lists and mappings
MOST = 100_000  # values, with aliases written out
DIGITS = 400  # of a number


def read_plain(path: Path, kind: str, start: str) -> Any:
    """Read the plain values of a YAML file; tags that would build objects are rejected.

    Args:
        path: Path of the file.
        kind: What the file is, for errors.
        start: An example of its content, for errors.

    Raises:
        ParameterError: It cannot be read, is not YAML of plain values, or exceeds the limits.
    """
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        text = content.decode("utf-8")
        _check(text)
        return yaml.load(text, _loader())
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise ParameterError(
            f"The {kind} {path} cannot be read ({error}).",
            "It must be YAML of plain values.",
            f"Start from '{start}'.",
        ) from error


def _loader() -> Any:
    """A loader of plain values that raises ValueError where a mapping has a key twice."""
    import yaml

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for number, (tag, value) in enumerate(keys):
                if (tag, value) in keys[:number]:
                    raise ValueError(f"the key {value!r} is there twice")
            return super().construct_mapping(node, deep)

    return Strict


def _check(text: str) -> None:
    """Raise ValueError if the values are nested too deeply, or too many or too long."""
    import yaml

    depth, sizes, anchors = 0, [0], dict[str, int]()  # sizes: values in each open list or mapping
    opened: list[str | None] = []
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            sizes.append(1)
            opened.append(anchor)
            if depth > DEEPEST:
                raise ValueError(f"nested deeper than {DEEPEST} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            size, anchor = sizes.pop(), opened.pop()
            sizes[-1] += size
            if anchor is not None:
                anchors[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in opened:
                raise ValueError(f"the alias {event.anchor!r} contains itself")
            sizes[-1] += anchors.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
            if anchor is not None:
                anchors[anchor] = 1
            if len(event.value) > DIGITS and event.style is None and event.value.lstrip("+-")[:1].isdigit():
                raise ValueError(f"a number of {len(event.value)} digits")
        if max(sizes) > MOST:
            raise ValueError(f"more than {MOST} values")
