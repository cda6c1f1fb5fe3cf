"""The folder of a checkpoint that is named: a folder itself, or a name of the Hugging Face hub.

A hub name is looked up in the hub's cache on this machine, as the transformers library does. Nothing is downloaded
unless it is asked for. Found by its entry point in `fdasync.checkpoints`: engines call it before they start a process,
and commands where they are given `--download`. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from fdasync.errors import CheckpointError


def checkpoint_folder(model: str, *, download: bool = False) -> str:
    """The folder; a name that is neither a folder nor one of the hub's is returned as it is.

    Args:
        model: a folder, or ORGANISATION/NAME.
        download: fetch what this machine lacks, with bars on stderr.

    Raises CheckpointError if the hub's cache does not have it, or the download fails.
    """
    if Path(model).exists() or not _is_hub_name(model):
        return model
    # not above: it takes half a second, and folders need none of it
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=not download)
    except LocalEntryNotFoundError as error:
        if not download:
            problem = f"no folder here, and the hub's cache ({constants.HF_HUB_CACHE}) does not have it"
            raise CheckpointError(model, f"{problem}; `hf download {model}` fetches it, or --download") from None
        raise CheckpointError(model, f"the hub cannot be reached: {_first_line(error.__cause__ or error)}") from error
    except Exception as error:  # of the hub's client, the network, the disk
        raise CheckpointError(model, f"the download failed: {_first_line(error)}") from error


def _is_hub_name(model: str) -> bool:
    organisation, _, name = model.partition("/")
    return bool(organisation.strip(".~")) and bool(name) and "/" not in name


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
