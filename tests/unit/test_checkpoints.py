"""Checkpoint files: whole or not there, data only, and found again."""

import errno
import os
import pickle
import subprocess
import time
import warnings
from contextlib import suppress

import pytest
import torch

from ssgrpo_lightning.checkpoints import (
    WholeFiles,
    last_of,
    previous,
    read,
    run_to_go_on_in,
    update_of,
)


def content(update, size=4):
    return {"state_dict": {"w": torch.full((size,), update)}, "loops": {}, "global_step": update}


def write(path, update, size=4):
    WholeFiles().save_checkpoint(content(update, size), path)
    # Files of one test must differ in age on any file system.
    os.utime(path, ns=(time.time_ns() + update * 10**9,) * 2)
    return path


def test_what_stood_there_is_kept_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "deep/last.ckpt"
    for update in (1, 2, 3):
        write(path, update)
    assert update_of(path) == 3 and update_of(previous(path)) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["last-previous.ckpt", "last.ckpt"]


def test_a_cut_off_file_is_refused_by_name_and_the_one_before_is_named(tmp_path):
    path = tmp_path / "last.ckpt"
    write(path, 1, 5000), write(path, 2, 5000)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut off or no checkpoint") as refused:
            read(path)
        assert str(path) in str(refused.value)
        assert f"use {previous(path)} (update 1)" in str(refused.value)
    path.unlink()
    with pytest.raises(ValueError, match=r"is no file: use .*previous.ckpt \(update 1\)"):
        read(path)


def test_foreign_files_are_refused_by_name(tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no checkpoint of `fit`: and no whole one"):
        read(path)
    path.write_text("accuracy: 1.0")
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        read(path)


class Harmful:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return (os.mkdir, (self.file,))


@pytest.mark.parametrize("plain", [True, False])
def test_a_harmful_pickle_does_not_run(tmp_path, plain):
    path, harm = tmp_path / "last.ckpt", tmp_path / "harm"
    bad = {**content(1), "callbacks": Harmful(harm)}
    path.write_bytes(pickle.dumps(bad)) if plain else torch.save(bad, path)
    with pytest.raises(ValueError):
        read(path)
    with pytest.raises(pickle.UnpicklingError):
        # Also where the caller, or the environment, asks for anything.
        WholeFiles().load_checkpoint(path, weights_only=False)
    assert update_of(path) is None and not harm.exists()
    # The same file is harmful to who reads it without care.
    with suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert harm.exists()


def test_a_write_that_fails_is_tried_again_then_said(tmp_path, monkeypatch):
    path, tries = tmp_path / "last.ckpt", []
    write(path, 1)
    real = torch.save

    def save(*args):
        tries.append(1)
        if len(tries) < heals:
            raise OSError(errno.EIO, "Input/output error")
        real(*args)

    monkeypatch.setattr(torch, "save", save)
    heals = 3
    WholeFiles(tries=4, wait=0.001).save_checkpoint(content(2), path)
    assert update_of(path) == 2 and len(tries) == 3
    heals = 10**9
    with pytest.warns(
        UserWarning, match="not written .*Input/output error.*one before it is whole"
    ):
        WholeFiles(tries=4, wait=0.001).save_checkpoint(content(3), path)
    assert len(tries) == 3 + 4 and update_of(path) == 2
    assert not list(tmp_path.glob("*.partial"))


def test_another_error_is_not_swallowed(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        WholeFiles().save_checkpoint({"f": lambda: 0}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_former_checkpoint_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        path = write(disk / "last.ckpt", 1, 10_000)
        with pytest.warns(UserWarning, match="not written .*No space left.*is whole"):
            start = time.monotonic()
            WholeFiles().save_checkpoint(content(2, 60_000), path)
        assert time.monotonic() - start < 1  # waiting would not help
        assert update_of(path) == 1 and [p.name for p in disk.iterdir()] == ["last.ckpt"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            WholeFiles().save_checkpoint(content(3, 10_000), path)
        assert update_of(path) == 3 and update_of(previous(path)) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_last_is_the_newest_whole_one_of_the_newest_run_with_any(tmp_path):
    assert last_of(tmp_path) is None
    write(tmp_path / "version_2/checkpoints/last.ckpt", 9)
    newest = tmp_path / "version_10/checkpoints"
    first, second = write(newest / "update1.ckpt", 1), write(newest / "last.ckpt", 2)
    (tmp_path / "version_11").mkdir()  # a run that left none yet
    assert last_of(tmp_path) == second
    second.write_bytes(b"half")
    assert last_of(tmp_path) == first
    first.write_bytes(b"")
    with pytest.raises(ValueError, match="version_10.* is whole"):
        last_of(tmp_path)


def test_a_run_goes_on_in_its_folder_unless_something_would_be_lost(tmp_path):
    folder = tmp_path / "version_3/checkpoints"
    older, newer = write(folder / "update4.ckpt", 4), write(folder / "last.ckpt", 8)
    assert run_to_go_on_in(newer, tmp_path) == 3
    assert run_to_go_on_in(older, tmp_path) is None
    newer.write_bytes(newer.read_bytes()[:100])
    assert run_to_go_on_in(older, tmp_path) == 3
    assert run_to_go_on_in(older, tmp_path / "elsewhere") is None
