"""Serving overheads: what a request and a step cost on the host outside the device's work.

Decides which such numbers there are and what a lone request pays of them. Does not decide when an engine schedules,
sleeps or polls (the simulator), nor what launching a prefill costs (`compute`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Fields


@dataclass(frozen=True, slots=True)
class Serving:
    """Host times of one serving stack.

    `client_in_s` and `client_in_per_token_s`: from the client through the API server into the engine, per token of the
    prompt. `client_out_s`: from the engine to the client, one chunk; `client_out_per_token_s`: the same per token of
    the prompt, on the first chunk only, where the client asked for token ids. `schedule_s`: one pass of the scheduler.
    `idle_poll_s`: from one look of an engine that has nothing to compute, but something to wait for, to the next.
    `decode_launch_s`: host part of a decode step, before its graph runs. `transfer_poll_s`: from one look of a transfer
    thread at its transfers to the next.

    What this project's connector adds (0 where a profile does not say). `transfer_start_s` and
    `transfer_start_per_token_s`: from the engine's word that a prompt is computed until P's transfer thread has planned
    what leaves whole. `part_s`: that thread makes a packed part ready, before it posts it. `landed_s`: D's transfer
    thread, from the message that a prompt is complete until the scheduler can hear of it. `load_s` and
    `load_per_token_s`: from the end of the pass that admits a prompt until its scatter is launched. `prepare_s` and
    `prepare_per_token_s`: how much longer the step in which it begins is prepared than one that only decodes, while the
    scatter is launched in the same interpreter.
    """

    client_in_s: float
    client_in_per_token_s: float
    client_out_s: float
    client_out_per_token_s: float
    schedule_s: float
    idle_poll_s: float
    decode_launch_s: float
    transfer_poll_s: float
    transfer_start_s: float
    transfer_start_per_token_s: float
    part_s: float
    landed_s: float
    load_s: float
    load_per_token_s: float
    prepare_s: float
    prepare_per_token_s: float

    @classmethod
    def from_fields(cls, fields: Fields) -> Serving:
        """Errors: `ProfileError`."""
        made = cls(
            client_in_s=fields.number("client_in_s", zero=True),
            client_in_per_token_s=fields.number("client_in_per_token_s", zero=True),
            client_out_s=fields.number("client_out_s", zero=True),
            client_out_per_token_s=fields.number("client_out_per_token_s", zero=True),
            schedule_s=fields.number("schedule_s", zero=True),
            idle_poll_s=fields.number("idle_poll_s", zero=True),
            decode_launch_s=fields.number("decode_launch_s", zero=True),
            transfer_poll_s=fields.number("transfer_poll_s", zero=True),
            transfer_start_s=fields.number("transfer_start_s", 0.0, zero=True),
            transfer_start_per_token_s=fields.number("transfer_start_per_token_s", 0.0, zero=True),
            part_s=fields.number("part_s", 0.0, zero=True),
            landed_s=fields.number("landed_s", 0.0, zero=True),
            load_s=fields.number("load_s", 0.0, zero=True),
            load_per_token_s=fields.number("load_per_token_s", 0.0, zero=True),
            prepare_s=fields.number("prepare_s", 0.0, zero=True),
            prepare_per_token_s=fields.number("prepare_per_token_s", 0.0, zero=True),
        )
        fields.finish()
        return made

    def request_s(self, n_tokens: int) -> float:
        """What a lone request of `n_tokens` with one output token takes beyond its steps: in, scheduled once, out."""
        per_token_s = self.client_in_per_token_s + self.client_out_per_token_s
        return self.client_in_s + self.client_out_s + self.schedule_s + per_token_s * n_tokens
