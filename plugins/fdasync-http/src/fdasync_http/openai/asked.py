"""What a body of OpenAI's asks of the engine: parameters, options, form of the text and of the rows.

Called by `completions.py` and `chat.py`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

from fdasync_http.client_names import Names
from fdasync_http.failures import Refused, unserved
from fdasync_http.fields import asked_by
from fdasync_http.sampling import params_of
from fdasync_http.sglang.meta import first_row
from fdasync_http.text import TextForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from fdasync import Grammar
    from fdasync.request import GenerateOptions, LogprobKind
    from fdasync_http.config import Dialect
    from fdasync_http.front import Front
    from fdasync_http.openai.types import CommonBody

# engines take seeds below it; OpenAI's may be any integer
_SEEDS = 1 << 63


class Asked:
    """A body and a prompt of it, checked.

    Args:
        prompt: text or token ids.
        number: of the prompt in its body; None: it is the only one.
        specials: the text shows special tokens whatever the body says.
        grammar: of the answer.
        grammar_field: returns the field that asks for it.
        echo: the answer repeats the prompt, with log-probs if it has some, and may have no new tokens.

    Attributes:
        body: as it came.
        prompt: see above.
        request_id: name of the request; the answer's `id`, by which it can be aborted.
        params, options: of the engine.
        names: of its fields in errors.
        form: how its text is made.
        rows: whose form the rows of its answer have.
        echo: see above.
        scores_only: it asks for no new tokens; the engine makes one, which is not given out.
    """

    def __init__(
        self,
        front: Front,
        body: CommonBody,
        prompt: str | list[int],
        *,
        prefix: str,
        max_tokens: int,
        with_logprobs: bool,
        top_logprobs: int,
        number: int | None = None,
        specials: bool = False,
        grammar: Grammar | None = None,
        grammar_field: Callable[[], str] = str,
        echo: bool = False,
    ) -> None:
        self.body = body
        self.names = Names(asked_by(type(body)), body, grammar_field)
        self.echo = echo
        self.prompt = prompt
        name = body.request_id or body.rid
        if name is None:
            name = f"{prefix}-{secrets.token_hex(12)}"
        self.request_id = name if number is None else f"{name}-{number}"
        told = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.scores_only = echo and told == 0
        told = 1 if self.scores_only else told
        scored = body.prompt_logprobs
        if scored is not None and scored < 0:
            raise unserved("prompt_logprobs", "the whole vocabulary; give a number of alternatives")
        if echo and with_logprobs:
            scored = max(scored or 0, top_logprobs)
        self.params = params_of(
            body,
            max_tokens=max_tokens if told is None else told,
            seed=None if body.seed is None else body.seed % _SEEDS,
            grammar=grammar,
            logprobs=_kind(front, body) if with_logprobs else "none",
            top_logprobs=top_logprobs,
            prompt_logprobs_start=None if scored is None else 0,
            prompt_top_logprobs=scored or 0,
            chosen_positions_start=0 if body.return_indexer_topk else None,
        )
        self.rows = _rows(front, body)
        start = body.routed_experts_prompt_start or 0
        if self.rows == "sglang":
            start = first_row(prompt, body.routed_experts_start_len)
        self.options: GenerateOptions = {
            "request_id": self.request_id,
            # SGLang serves high numbers first, vLLM low ones
            "priority": body.priority if front.config.dialect == "sglang" else -body.priority,
            "routing": self.rows != "none",
            "aux": False,
            "start": start if self.rows != "none" else 0,
            "cache_salt": body.cache_salt or body.extra_key,
        }
        self.form = TextForm(
            front,
            specials=specials or not body.skip_special_tokens,
            keeps_stop=asks_for_stops(body),
            stop=self.params.stop,
        )


def asks_for_stops(body: CommonBody) -> bool:
    """Whether text goes on over what stopped it."""
    return body.no_stop_trim or body.include_stop_str_in_output


def check_common(front: Front, body: CommonBody) -> None:
    """Raise Refused for a model that is not served, and for fields that contradict each other."""
    check_model(front, body.model, front.config.dialect)
    if body.return_indexer_topk and body.stream:
        raise unserved("return_indexer_topk", "not in a stream; leave one of them out, or use /generate")
    if body.best_of not in (None, body.n):
        raise unserved("best_of", "ask for n")


def check_model(front: Front, name: str, dialect: Dialect) -> None:
    """Raise Refused (404) for the name of a model that is not served, where the settings or, by them, the dialect's
    server refuse it; "": the request names none."""
    if front.config.unknown_models == "serve" or (front.config.unknown_models == "auto" and dialect == "sglang"):
        return
    facts = front.generator.facts()
    if name not in ("", front.model, facts.model, facts.model_path):
        raise no_model(front, name)


def no_model(front: Front, name: str) -> Refused:
    """The answer to a name that no model has."""
    words = f"there is no model {name!r}; this is {front.model!r}"
    return Refused(404, words, param="model", code="model_not_found")


def _kind(front: Front, body: CommonBody) -> LogprobKind:
    """vLLM's log-probs are the model's own; SGLang's are of the distribution that was sampled from, and the model's own
    where nothing is random."""
    return "raw" if front.config.dialect == "vllm" or body.temperature == 0 else "processed"


def _rows(front: Front, body: CommonBody) -> Literal["none", "sglang", "vllm"]:
    is_vllm = body.routed_experts_prompt_start is not None
    if not (is_vllm or body.return_routed_experts):
        return "none"
    field = "routed_experts_prompt_start" if is_vllm else "return_routed_experts"
    if is_vllm and body.return_routed_experts:
        raise Refused(400, "it and return_routed_experts ask for rows in two forms; give one", param=field)
    if not front.generator.facts().captures_routing:
        raise Refused(400, "this engine captures no expert routing", param=field, code="not_served")
    return "vllm" if is_vllm else "sglang"
