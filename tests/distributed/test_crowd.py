"""Many ranks at one store: what goes through it grows with their number, and no rank reads what others wrote."""

import pytest
from crowds import crowd

PHASES = ("first save", "second save", "resume")


def test_what_a_rank_reads_does_not_grow_with_the_ranks(tmp_path):
    """Whole saves and a resume, each rank a thread of few processes."""
    few, more = (crowd(size, tmp_path / str(size)) for size in (6, 18))
    for phase in PHASES:
        assert more[phase].most_got < 1.5 * few[phase].most_got, phase
        assert more[phase].got < 4 * few[phase].got, phase  # three times the ranks
        assert more[phase].put < 4 * few[phase].put, phase


@pytest.mark.slow
def test_meetings_of_a_thousand_ranks(tmp_path):
    """Under a second of processor and 100 MB for a rank, rank 0 included; a few MB through the store in all."""
    found = crowd(1024, tmp_path / "many", "meetings", timeout=500)
    for phase in PHASES:
        figures = found[phase]
        assert max(figures.leader_seconds, figures.rank_seconds) < 1, (phase, figures)
        assert figures.leader_peak < 100 << 20, (phase, figures)
        assert figures.most_got < 4096, (phase, figures)
        assert figures.put + figures.got < 16 << 20, (phase, figures)
