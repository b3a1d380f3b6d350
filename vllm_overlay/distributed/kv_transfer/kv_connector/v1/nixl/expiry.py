# SPDX-License-Identifier: Apache-2.0
"""0.22.0 to 0.30.0: a lease that has run out ends, whatever other leases do.

A worker of P looks through its leases from the oldest on and stops at the first that lives. They
were in the order of their deadlines once. Since a heartbeat moves a deadline where it stands, and
since what D keeps for a second turn has a longer lease than what P keeps for D, one that lives on
hides all behind it that do not.
"""

from __future__ import annotations


def expired_first(leases: dict[str, float], now: float) -> dict[str, float]:
    """Return the leases (request id -> deadline, in seconds on the clock of `now`) so ordered that
    those that have run out come first, and otherwise as they were; the same object if none has.
    """
    expired = {req_id: deadline for req_id, deadline in leases.items() if deadline <= now}
    return {**expired, **leases} if expired else leases
