"""What was settled lately is known, at 8 bytes each."""

import sys

from schemas.control import Cancel
from service.worker.cancellations import Cancellations


def test_of_the_ids_that_were_settled_the_last_ones_are_known_and_nothing_grows() -> None:
    cancellations = Cancellations(100)
    assert not cancellations.too_late(Cancel(request=""))
    for number in range(1050):
        cancellations.settled(f"r{number}")
    late = [cancellations.too_late(Cancel(request=f"r{number}")) for number in range(1050)]
    assert late == [False] * 950 + [True] * 100
    assert not cancellations.too_late(Cancel(correlation_id="r1049"))
    assert sys.getsizeof(cancellations._settled) < 2000
