"""The files of a dump: which ones hold samples, whose they are, and in which order they are taken."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.data.imports.formats import FORMATS, MODELOPT, SPECFORGE, SPECULATORS, DumpFormat, format_of_pt
from eagle3.data.imports.torch_file import load_tensors
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.files import readable

# What the same tools leave beside their samples, and is none.
_BESIDE = ("vocab_mapping.pt", "token_freq.pt", "d2t.pt", "t2d.pt")
_SHOWN = 3


@dataclass(frozen=True)
class Dump:
    """A folder of samples.

    Attributes:
        folder: where they are.
        format: whose they are.
        names: paths inside the folder, with slashes, ascending; a sample's name is its id.
    """

    folder: Path
    format: DumpFormat
    names: Sequence[str]


def find_dump(folder: Path, name: str = "auto") -> Dump:
    """The samples in a folder and below it.

    Args:
        folder: of the dump.
        name: of a format, or `auto`: then a folder that holds several is refused, else other files are left out.

    Raises:
        ProblemsError: kinds `import.source`, `import.empty`, `import.mixed`, `import.name`.
    """
    if not folder.is_dir():
        message = "is a file, expected the folder of a dump" if folder.exists() else "no such folder"
        raise problem_error(str(folder), "import.source", message, "give the folder that holds the samples")
    wanted = tuple(FORMATS.values()) if name == "auto" else (FORMATS[name],)
    files = sorted(_files(folder, tuple(suffix for dump in wanted for suffix in dump.suffixes)))
    if not files:
        suffixes = " or ".join(dict.fromkeys(suffix for dump in wanted for suffix in dump.suffixes))
        raise problem_error(str(folder), "import.empty", f"holds no file {suffixes}", "check source, and format")
    if bad := [file for file in files if not _is_text(file)]:
        message = f"{len(bad)} files have names that are no text, e.g. {os.fsencode(bad[0])!r}"
        raise problem_error(str(folder), "import.name", message, "rename them: a name becomes the sample's id")
    return Dump(folder, wanted[0] if name != "auto" else _the_only_format(folder, files), files)


def _the_only_format(folder: Path, files: Sequence[str]) -> DumpFormat:
    groups: dict[str, list[str]] = {}
    formats: dict[str, DumpFormat] = {}
    for suffix, dump in ((".ckpt", SPECFORGE), (".ckpt.gz", SPECFORGE), (".safetensors", SPECULATORS)):
        if found := [file for file in files if file.endswith(suffix)]:
            groups.setdefault(dump.name, []).extend(found)
            formats[dump.name] = dump
    if pickled := [file for file in files if file.endswith(".pt")]:
        dump = _first_readable(folder, pickled)
        groups.setdefault(f"{dump.name} (.pt)", []).extend(pickled)
        formats[f"{dump.name} (.pt)"] = dump
    if len(groups) > 1:
        said = "; ".join(f"{len(found):,} of {name}: {_some(found)}" for name, found in groups.items())
        message = f"holds files of several formats: {said}"
        raise problem_error(str(folder), "import.mixed", message, "give format, which leaves the others out")
    return next(iter(formats.values()))


def _first_readable(folder: Path, files: Sequence[str]) -> DumpFormat:
    """Told by the first file that can be loaded; the others are held to it when they are read."""
    for file in files:
        try:
            return format_of_pt(load_tensors(folder / file))
        except ProblemsError:
            continue  # named, with all other bad files, when they are read
    return MODELOPT


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    def refuse(error: OSError) -> None:
        raise error

    found = []
    with readable(folder):
        for place, _, names in os.walk(folder, onerror=refuse):
            inside = Path(place).relative_to(folder)
            found += [(inside / name).as_posix() for name in names if name.endswith(suffixes) and name not in _BESIDE]
    return found


def check_places(source: Path, output: Path) -> list[Problem]:
    """A problem if one folder is inside the other: an import would then read what it writes."""
    inner, outer = source.resolve(), output.resolve()
    if inner == outer or inner.is_relative_to(outer) or outer.is_relative_to(inner):
        message = f"source {source} and output lie inside each other, or are the same folder"
        return [Problem(str(output), "import.same_place", message, "give an output outside the dump")]
    return []


def warn_of_locks(dump: Dump) -> None:
    """Says which samples may still be being written: vLLM's connector keeps a lock file beside those."""
    locked = [name for name in dump.names if (dump.folder / f"{name}.lock").exists()]
    if locked:
        print(f"note: lock files lie beside {len(locked):,} samples: {_some(locked)}", file=sys.stderr)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
