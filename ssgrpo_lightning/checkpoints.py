"""Checkpoint files: whole or not there, read as data only, found again after a run has died."""

import errno
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REQUIRED = {"state_dict", "loops", "global_step"}


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint beside its name and renames it, so that no reader ever sees half of one.

    What stood under the name stays as ``NAME-previous.ckpt``. A write that fails is tried again,
    unless the disk is full; then people are told, the run goes on, and what stood there stays.
    Reading takes tensors and plain data only, whatever was asked: a pickle cannot run code.

    Args:
        tries: Times that a write is tried.
        wait: Seconds before the second try; each further wait is twice as long.
    """

    def __init__(self, tries: int = 4, wait: float = 1.0) -> None:
        super().__init__()
        self.tries, self.wait = tries, wait

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if "://" in str(path):  # object stores show a file once it is complete
            return super().save_checkpoint(checkpoint, path, storage_options)
        failure: BaseException | None = None
        for turn in range(self.tries):
            try:
                return _replace(Path(path), lambda file: torch.save(checkpoint, file))
            except (OSError, RuntimeError) as error:
                # torch's writer turns the error of the file below it into one of its own.
                failure = _root(error)
                if not isinstance(failure, OSError):
                    raise
                if failure.errno in FULL:
                    break
                if turn + 1 < self.tries:
                    sleep(self.wait * 2**turn)
        left = "the one before it is whole" if Path(path).exists() else "there is none before it"
        rank_zero_warn(
            f"checkpoint {path} was not written ({failure}); {left}. The run goes on, and tries "
            "again when the next one is due"
        )

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)


def _replace(path: Path, write: Callable[[Any], None]) -> None:
    """Put what `write` writes in the place of a file, which is kept as the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if path.exists():
        path.replace(previous(path))
    partial.replace(path)


def _root(error: BaseException) -> BaseException:
    """The error that an error was raised for or during, or itself."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def previous(path: Path) -> Path:
    """Where the checkpoint is kept that stood at `path` before."""
    return path.with_stem(f"{path.stem}-previous")


def read(path: Path) -> dict[str, Any]:
    """A checkpoint whose tensors are read from the file only when they are used.

    Raises:
        ValueError: The file is missing, cut off, foreign, or holds more than data; it names the
            newest whole one beside it.
    """
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        what = "which is no file"
    except pickle.UnpicklingError:
        what = "which holds more than tensors and plain data and is refused unread"
    except (RuntimeError, EOFError, OSError) as error:
        what = f"which is cut off or no checkpoint ({str(error).splitlines()[0][:120]})"
    else:
        if isinstance(content, dict) and content.keys() >= REQUIRED:
            return content
        what = "which is a file of torch, but no checkpoint of `fit`"
    other = next((found for found in newest_first(path.parent) if found != path), None)
    way_out = "and no whole one lies beside it" if other is None else f"use {_named(other)}"
    raise ValueError(f"--ckpt_path is {str(path)!r}, {what}: {way_out}")


def newest_first(folder: Path) -> Iterator[Path]:
    """Whole checkpoints of a folder, the one written last first."""
    files = [(path.stat().st_mtime_ns, path) for path in folder.glob("*.ckpt") if path.is_file()]
    for _, path in sorted(files, reverse=True):
        if update_of(path) is not None:
            yield path


def update_of(path: Path) -> int | None:
    """Updates that had been made when a checkpoint was written; None if it is not whole."""
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        return content["global_step"] if content.keys() >= REQUIRED else None
    except (RuntimeError, EOFError, OSError, AttributeError, pickle.UnpicklingError):
        return None


def last_of(root: Path) -> Path | None:
    """The newest whole checkpoint of the newest run below `root` that has left any.

    Raises:
        ValueError: That run has left checkpoints, none of them whole.
    """
    runs = [path for path in root.glob("version_*") if path.name[8:].isdigit()]
    for run in sorted(runs, key=lambda path: int(path.name[8:]), reverse=True):
        if any((run / "checkpoints").glob("*.ckpt")):
            found = next(newest_first(run / "checkpoints"), None)
            if found is None:
                raise ValueError(
                    f"--ckpt_path is last, but no checkpoint in {run / 'checkpoints'} is whole: "
                    "name one of another run, or leave --ckpt_path out to start anew"
                )
            return found
    return None


def run_to_go_on_in(path: Path, root: Path) -> int | None:
    """Number of the run folder below `root` that a resumed run goes on in; None: a new one.

    It goes on where the checkpoint comes from, unless a later one lies there: that would be lost.
    """
    run, update = path.resolve().parent.parent, update_of(path)
    if run.parent != root.resolve() or not run.name[8:].isdigit() or update is None:
        return None
    later = (update_of(other) or 0 for other in path.parent.glob("*.ckpt"))
    return None if any(other > update for other in later) else int(run.name[8:])


def _named(path: Path) -> str:
    return f"{path} (update {update_of(path)})"
