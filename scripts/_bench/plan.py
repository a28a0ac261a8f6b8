"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "QUICK", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of everything, so that one object says how long a run takes."""

    runs_at: dict[int, int]
    """Runs in flight -> how many runs are driven to measure it."""
    runs_one_by_one: int
    """With group commit off, at the largest number in flight."""
    floor_sagas: int
    floor_ways: tuple[tuple[int, int], ...]
    """Loops, and how many runs each of them drives at a time; the best counts."""
    latency_samples: int
    settled: tuple[int, ...]
    delayed: int
    claim_samples: int
    claim_batch: int
    backlog: int
    claimers: int
    lost: int
    lost_lease_s: float
    live: tuple[int, ...]
    payloads: dict[int, int]
    """Bytes of a context -> how many runs are driven with it."""
    arrivals_per_s: int
    arrivals_s: float
    peer_runs: int
    peer_in_flight: tuple[int, ...]


FULL = Plan(
    runs_at={1: 400, 64: 8_000, 512: 12_000},
    runs_one_by_one=2_500,
    floor_sagas=20_000,
    floor_ways=((2, 128), (4, 128), (2, 256)),
    latency_samples=300,
    settled=(1_000, 100_000, 1_000_000),
    delayed=100_000,
    claim_samples=200,
    claim_batch=50,
    backlog=20_000,
    claimers=4,
    lost=1_000,
    lost_lease_s=6.0,
    live=(1_000, 4_000),
    payloads={1_000: 4_000, 100_000: 300, 1_000_000: 40},
    arrivals_per_s=1_000,
    arrivals_s=20.0,
    peer_runs=1_000,
    peer_in_flight=(16, 64, 256),
)

QUICK = Plan(
    runs_at={1: 5, 16: 60},
    runs_one_by_one=40,
    floor_sagas=60,
    floor_ways=((2, 16),),
    latency_samples=3,
    settled=(10, 200),
    delayed=50,
    claim_samples=3,
    claim_batch=5,
    backlog=60,
    claimers=2,
    lost=10,
    lost_lease_s=0.5,
    live=(20, 60),
    payloads={1_000: 10, 100_000: 4},
    arrivals_per_s=50,
    arrivals_s=0.5,
    peer_runs=20,
    peer_in_flight=(8,),
)
