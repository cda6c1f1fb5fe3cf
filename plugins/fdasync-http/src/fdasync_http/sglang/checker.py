"""SGLang's `/weights_checker`: a checksum of the weights in place, and whether they have changed since a snapshot.

Its `reset_tensors`, by which trainers spoil the weights so that an update must bring all of them, is refused: a server
that is told so by anybody would answer from noise. An update's `expected_weights_id` compares all weights with the
trainer's own. Called by `paths.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from fdasync.errors import ConfigError, FdasyncError
from fdasync_http.calls import Call, reply
from fdasync_http.failures import Refused, refused_of
from fdasync_http.fields import Table, ignored
from fdasync_http.sglang.control import OWN

if TYPE_CHECKING:
    from fdasync_http.front import Front

_RESET = (
    "reset_tensors is not served: weights are never spoilt; give an update expected_weights_id, the fingerprint of the"
    " trainer's weights, which compares all of them"
)


class Checked(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `/weights_checker`.

    Attributes:
        success: it was done, and of "compare": the weights are the same.
        message: in words.
        per_engine_checksum: XXH3-128 of all weights, as updates take it for `expected_weights_id`; "" where it is not
            known.
    """

    success: bool
    message: str
    per_engine_checksum: str = ""


class CheckWeights(Call):
    """`GET` or `POST /weights_checker`: 400 with `success` false where the weights differ from the snapshot. No step
    runs while they are hashed.

    Attributes:
        action: "checksum": tell the fingerprint. "snapshot": keep it. "compare": compare it with the kept one.
            "reset_tensors" is refused.
        skip_tensor_list: tensors that do not count; only none is served.
    """

    RULES: ClassVar[Table] = {**OWN, **ignored("all bytes of all weights count", "allow_quant_error", "selector")}

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    skip_tensor_list: list[str] | None = None

    async def do(self, front: Front) -> Any:
        if self.action == "reset_tensors":
            raise Refused(501, _RESET, param="action", code="not_served")
        if self.skip_tensor_list:
            raise Refused(400, "all tensors are compared together; leave it out", param="skip_tensor_list")
        if self.action == "compare" and not front.snapshot:
            return reply(Checked(False, "there is no snapshot to compare with"), 400)
        try:
            found = await front.generator.weights_fingerprint()
        except ConfigError as error:
            raise Refused(501, str(error), code="not_served") from error
        except FdasyncError as error:
            refused = refused_of(error)
            return reply(Checked(False, refused.message), refused.status)
        if self.action == "compare":
            if found != front.snapshot:
                problem = f"the weights have the fingerprint {found}, the snapshot {front.snapshot}"
                return reply(Checked(False, problem, found), 400)
            return Checked(True, "the weights are those of the snapshot", found)
        if self.action == "snapshot":
            front.snapshot = found
        return Checked(True, f"{self.action}: {found}", found)
