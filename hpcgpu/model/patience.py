"""How long a cluster object waits for its batch system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """For how long an answer is awaited, and how soon the batch system is asked again.

    A batch system serves everybody, and one that is slow or down for a while costs no cluster: these are no options.
    Tests, whose batch system is their own, give less.

    Attributes
    ----------
    submission_s : float
        A submission that has not been answered by then is killed; the job may come all the same.
    retries_s : tuple of float
        After each of these waits a job is looked for and, but for the last, submitted again.
    ask_s : float
        Between two questions when something is new.
    news_s : float
        Between two questions when there is a sign of news, and before the first one.
    refused_s : float
        The next submission after a refusal that may pass, and the next question after no answer.

    """

    submission_s: float = 60.0
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0, 4.0)
    ask_s: float = 5.0
    news_s: float = 1.0
    refused_s: float = 30.0
