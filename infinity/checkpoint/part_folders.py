"""Where the parts of a model lie that processes have been given by their script: each in a folder of its own.

[Note: checkpoints of parts] A checkpoint of each part is complete for itself, and so is the file that names the latest.
Processes may go down when some parts have the new one and others have not. So each part keeps two at least, and what is gone on
from is one that all parts have. Where some have one and others none, the first save was cut off: there is nothing yet.
Where a tag was saved again and that was cut off, parts have it of different steps: then they do not have the same one.
"""

from __future__ import annotations

from pathlib import Path

from infinity.checkpoint.manifest import MANIFEST, completed_at
from infinity.checkpoint.saved import Checkpoint, find
from infinity.distributed.agreement import gather_results
from infinity.distributed.meshes import Mesh
from infinity.errors import CheckpointError, ModelError


def folder_of(mesh: Mesh, directory: Path) -> Path:
    """Where checkpoints of this process's part are: ``directory`` itself, if it has the whole model."""
    return directory / f"part{mesh.part}-of-{mesh.parts.num}" if mesh.is_divided else directory


def check_parts(mesh: Mesh, directory: Path) -> None:
    """See that the checkpoints in ``directory`` are not of a model that was divided in another way.

    Raises:
        CheckpointError: they are.
    """
    own = folder_of(mesh, directory)
    if own.is_dir() and own != directory:
        return
    found = {path.name.partition("-of-")[2] for path in directory.glob("part*-of-*") if path.is_dir()}
    others = sorted(found - {str(mesh.parts.num)})  # of another part, there may be one where the first save was cut off
    if (directory / "latest").is_file():
        others = [] if own == directory else ["1"]
    if others:
        raise CheckpointError(
            directory,
            f"it is of a model in {' or '.join(others)} part(s), and here it is in {mesh.parts.num}",
            cure="Divide the model as it was divided then (mesh_param)",
        )


def common_tag(
    mesh: Mesh,
    directory: Path,
    tag: str | None,
    what: str,
) -> str | None:
    """The checkpoint that all parts go on from: ``tag``, or the newest that all have; None if there is none.

    Args:
        mesh: who has which part; all come here.
        directory: where all parts are.
        tag: as the script gave it.
        what: for messages.

    Raises:
        CheckpointError: some parts have it and others have not, or have it of another step, on all ranks.
    """
    if not mesh.is_divided:
        return tag
    own = folder_of(mesh, directory)

    def latest() -> str | None:
        check_parts(mesh, directory)
        found = find(own, tag)
        return None if found is None else found.name

    tags = [each for each in dict.fromkeys(gather_results(mesh.everyone, what, latest)) if each is not None]
    if not tags:
        return None
    ages = gather_results(mesh.everyone, what, lambda: [_completed_at(own / each) for each in tags])
    found = {each: max(of_parts) for each, of_parts in zip(tags, zip(*ages, strict=True), strict=True) if all(of_parts)}
    steps = gather_results(mesh.everyone, what, lambda: [_step(own / each) for each in found])
    differing = ""
    for each, of_parts in zip([*found], zip(*steps, strict=True), strict=True):
        if len({*of_parts}) > 1:
            del found[each]
            differing += f"; {each} is of the steps {', '.join(map(str, sorted({*of_parts})))} in different parts"
    if found:
        return max(found, key=lambda each: (found[each], each))
    nums = gather_results(
        mesh.everyone, what, lambda: sum(_completed_at(each) > 0 for each in own.iterdir()) if own.is_dir() else 0
    )
    if tag is None and max(nums) == 1 and min(nums) == 0:
        return None
    raise CheckpointError(
        directory,
        f"there is no checkpoint that all {mesh.parts.num} parts of the model have; some have {', '.join(tags)}{differing}",
        cure="Give the directory that all processes saved to, and the tag of one that all parts have",
    )


def _completed_at(folder: Path) -> int:
    """Time at which a checkpoint was completed; 0: it is not complete."""
    try:
        return completed_at(folder / MANIFEST) or 0
    except OSError:
        return 0


def _step(folder: Path) -> int:
    """Step of a complete checkpoint."""
    return int(Checkpoint(folder).training_state()["counters"]["global_steps"])


def check_apart(mesh: Mesh, directory: Path) -> None:
    """See that parts are not exported over each other.

    Raises:
        ModelError: several are to go to ``directory``; nothing has been written.
    """
    found = {*gather_results(mesh.everyone, "an export", lambda: (str(directory.absolute()), mesh.part))}
    if len({path for path, _ in found}) < len(found):
        raise ModelError(
            f"'{directory}' would get {mesh.parts.num} parts of the model, one over the other",
            cure="Give each part a directory of its own (engine.get_model_parallel_rank() is its number), and put them together "
            "as the script has divided them",
        )
