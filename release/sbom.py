"""Bill of materials of a release: all packages that probhard installs, with versions and licences.

    python release/sbom.py --output dist

writes ``sbom.json`` (CycloneDX 1.5) and ``licences.md``, from the metadata of the installed packages alone, without the
network. It says nothing about vulnerabilities: the workflow ``audit.yml`` looks these up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

NAME, EXTRAS = "probhard", ("all",)
UNKNOWN = "unknown"


def key(name: str) -> str:
    """The normal form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(package: Distribution, extras: Sequence[str]) -> Iterator[Requirement]:
    """The requirements of a package that hold here, with the chosen extras."""
    for text in package.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def collect(name: str = NAME, extras: Sequence[str] = EXTRAS) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """All installed packages that a package needs, itself first, and the names that each needs directly.

    Args:
        name: The package.
        extras: Its extras.
    """
    packages, needs = dict[str, Distribution](), dict[str, set[str]]()
    done, pending = set[tuple[str, str]](), [(name, extra) for extra in ("", *extras)]
    while pending:
        wanted, extra = pending.pop(0)
        if (key(wanted), extra) in done:
            continue
        done.add((key(wanted), extra))
        try:
            package = distribution(wanted)
        except PackageNotFoundError:  # a requirement of another platform, or an extra that is not installed
            continue
        packages.setdefault(key(wanted), package)
        own = needs.setdefault(key(wanted), set())
        for requirement in required(package, [extra] if extra else []):
            own.add(key(requirement.name))
            pending += [(requirement.name, part) for part in ("", *requirement.extras)]
    return packages, {name: {other for other in own if other in packages} - {name} for name, own in needs.items()}


def licence(package: Distribution) -> str:
    """The licence of a package: its SPDX expression, a classifier, or the first line of its licence field."""
    about = package.metadata
    classifiers = [text.split(" :: ")[-1] for text in about.get_all("Classifier") or () if text.startswith("License")]
    named = [text for text in classifiers if text != "OSI Approved"]
    lines = [line.strip() for line in (about.get("License") or "").splitlines() if line.strip()]
    return about.get("License-Expression") or " OR ".join(named) or (lines[0][:80] if lines else UNKNOWN)


def component(name: str, package: Distribution) -> dict[str, Any]:
    """A package as a component of CycloneDX."""
    purl = f"pkg:pypi/{name}@{package.version}"
    found = licence(package)
    content: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": package.version}
    content |= {"purl": purl, "licenses": [{"license": {"name": found}}]}
    record = package.read_text("RECORD")
    if record:
        digest = hashlib.sha256(record.encode()).hexdigest()
        content["properties"] = [{"name": f"{NAME}:sha256-of-RECORD", "value": digest}]
    return content


def bill(packages: dict[str, Distribution], needs: dict[str, set[str]]) -> dict[str, Any]:
    """The bill of materials; equal installations give equal bills."""
    parts = {name: component(name, package) for name, package in packages.items()}
    main = parts.pop(NAME)
    others = [parts[name] for name in sorted(parts)]
    reference = {name: f"pkg:pypi/{name}@{package.version}" for name, package in packages.items()}
    graph = [
        {"ref": reference[name], "dependsOn": sorted(reference[other] for other in needs[name])}
        for name in sorted(packages)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**main, "type": "library"}},
        "components": others,
        "dependencies": graph,
    }


def licences(packages: dict[str, Distribution]) -> str:
    """A table of all packages with their licences, as Markdown."""
    rows = [f"| {name} | {packages[name].version} | {licence(packages[name])} |" for name in sorted(packages)]
    head = ["# Licences of dependencies", "", "Read from the metadata of the installed packages.", ""]
    return "\n".join([*head, "| package | version | licence |", "|---|---|---|", *rows]) + "\n"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("dist"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    packages, needs = collect()
    (output / "sbom.json").write_text(json.dumps(bill(packages, needs), indent=1) + "\n", encoding="utf-8")
    (output / "licences.md").write_text(licences(packages), encoding="utf-8")
    print(f"{len(packages) - 1} dependencies: {output / 'sbom.json'}, {output / 'licences.md'}")


if __name__ == "__main__":
    main()
