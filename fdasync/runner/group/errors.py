"""Errors of one rank, told as the group's: the same class and fields, and the rank in the words.

Pure. Called by the other files of this room.
"""

from __future__ import annotations

from fdasync.errors import ConfigError, FdasyncError, RunnerError, UnsupportedModel

# of errors about the number of ranks
_GROUP_FIELDS = ("tensor_parallel", "sum_slices")


def rank_name(rank: int, ranks: int) -> str:
    """What errors call a rank."""
    return f"rank {rank} of {ranks}"


def of_rank(error: BaseException, rank: int, ranks: int) -> FdasyncError:
    """The error with its rank in its words; a RunnerError where it is no error of fdasync, or has no words to change.

    An error that names the rank already, as a worker process's errors do, stays as it is. So does an error that holds
    for all ranks alike, and that each finds by itself: a model that is not supported, or not with so many ranks.
    """
    if isinstance(error, UnsupportedModel):
        return error
    if isinstance(error, ConfigError) and error.field.rpartition(".")[2] in _GROUP_FIELDS:
        return error
    name = rank_name(rank, ranks)
    if isinstance(error, FdasyncError):
        if name in str(error):
            return error
        if error.words in error.fields():
            named: FdasyncError = error.told_by(name)
            named.__cause__ = error
            return named
    told = RunnerError(f"{name}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
