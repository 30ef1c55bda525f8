"""What users are to get of a model, whether a request got it, and why not.

A token is due when it would come at the latest of a model that keeps both times exactly: the first one ``ttft_s`` after
the request, each further one ``tpot_s`` after the one before it is due. So Aegaeon counts (``compute_request_metrics``
in its artifact, doi 10.5281/zenodo.16673199); here the first token and the last one are judged. What comes early gives
time to what follows, and no token that comes sooner makes a miss of a request that is met. By the mean time per token
since the first one, which is TPOT to vLLM's bench, it could: that can be longer than ``tpot_s``.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from schemas.base import Value

CLASS_NAME = r"^[A-Za-z0-9._-]{1,64}$"
"""What a class of requests may be called."""


class Objective(BaseModel):
    """What users are to get: both times, for a share of their requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ttft_s: float = Field(gt=0)
    """Seconds from a request's arrival to its first token."""
    tpot_s: float = Field(gt=0)
    """Seconds for each further token: the last one of ``n`` is due ``ttft_s + (n - 1) * tpot_s`` after the arrival."""
    share: float = Field(default=0.9, gt=0, le=1)
    """Of all requests, how many are to meet both."""

    def loosened(self, ttft_s: float | None, tpot_s: float | None) -> "Objective":
        """This one, or of each time the longer one where another is given: nobody gets more by asking."""
        first, further = max(self.ttft_s, ttft_s or 0.0), max(self.tpot_s, tpot_s or 0.0)
        if first == self.ttft_s and further == self.tpot_s:
            return self
        return Objective(ttft_s=first, tpot_s=further, share=self.share)


class Miss(StrEnum):
    """Why a request did not get what it was to get: of a late first token what took longest, else what it ended by."""

    READ = "read"
    """No worker had read it."""
    TURN = "turn"
    """Another model was active."""
    SWITCH = "switch"
    QUEUE = "queue"
    """Its model was active, and others were before it."""
    PARK = "park"
    """It was in its model's own topic."""
    QUOTA = "quota"
    """Its tenant had what it may have."""
    PREFILL = "prefill"
    """It ran, and had no token yet."""
    FROZEN = "frozen"
    """After its first token: another model was active for too long."""
    DECODE = "decode"
    """Its tokens came too slowly while it ran."""
    FAILED = "failed"


class Attainment(Value):
    """The objective that counted for a request, and whether it was met."""

    ttft_s: float
    tpot_s: float
    request_class: str = ""
    """Of its model's classes the one that its header named; empty: none."""
    met: bool
    missed_by: Miss | None = None
