"""The policy's weights in a checkpoint: one file, or a folder of shards. Runs no code in it."""

import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

POLICY = "policy.policy.model."
"""What stands before transformers' names of the policy's parameters."""
INDEX, REST = ".metadata", "meta.pt"
"""Files of a folder of shards: which shard holds what, and all that is no tensor."""
CHECKPOINT = "torch.distributed.checkpoint"
# What such an index is made of. It is a pickle, and may name nothing else.
PLAIN = {
    ("collections", "OrderedDict"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
    *(
        (f"{CHECKPOINT}.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of the policy.

    Attributes:
        weights: Its parameters under transformers' names.
        rest: The entries of the checkpoint that are no weights: counters, states of callbacks.
    """

    weights: dict[str, Tensor]
    rest: dict[str, Any]


def read(path: Path) -> Saved:
    """Read a checkpoint.

    Args:
        path: A file that Lightning wrote, or a folder that ``torch.distributed.checkpoint`` did.

    Raises:
        ValueError: There is none, it is damaged, it holds more than data, or no policy.
    """
    if not path.is_file() and not (path / INDEX).is_file():
        raise ValueError(
            f"ckpt_path is {str(path)!r}, must be a checkpoint: a file of a run's checkpoints "
            f"folder, or a folder of shards with a file {INDEX}"
        )
    try:
        found = _shards(path) if path.is_dir() else _file(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        raise ValueError(
            f"ckpt_path is {str(path)!r}, which cannot be read as data alone "
            f"({str(error).splitlines()[0]}): it is damaged, or holds code, which is never run; "
            "name another checkpoint of the run"
        ) from error
    if not found.weights:
        raise ValueError(
            f"ckpt_path is {str(path)!r}, which holds no parameter under {POLICY!r}: name a "
            "checkpoint that SSGRPO wrote"
        )
    return found


def _file(path: Path) -> Saved:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    state = checkpoint.pop("state_dict", {})
    weights = {k.removeprefix(POLICY): v for k, v in state.items() if k.startswith(POLICY)}
    return Saved(weights, checkpoint)


def _shards(folder: Path) -> Saved:
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.removeprefix("state_dict.").startswith(POLICY)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # that this is one process
        load(wanted, storage_reader=reader, no_dist=True)
    rest = folder / REST
    return Saved(
        {name.partition(POLICY)[2]: tensor for name, tensor in wanted.items()},
        torch.load(rest, map_location="cpu", weights_only=True) if rest.is_file() else {},
    )


class _Reader(FileSystemReader):
    """Torch's reader of shards with an index that cannot run code, as torch's own can."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}")
