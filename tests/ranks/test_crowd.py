"""Many ranks at one store: what goes through it grows with their number, and no rank reads what
others wrote.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from crowds import crowd
from torch.distributed import HashStore

from ft_ckpt.errors import CheckpointError, LoadError, RankError, RanksDisagreeError
from ft_ckpt.ranks import Ranks

SIGNS_BYTES = 4096  # of a rank in a phase, on a busy machine
MANY = 40  # more than a rank looks at at a time
PHASES = ("first save", "second save", "resume")


@pytest.mark.slow
def test_what_a_rank_reads_does_not_grow_with_the_ranks(tmp_path):
    """Whole saves and a resume, each rank a thread of few processes."""
    few, more = (crowd(size, tmp_path / str(size)) for size in (6, 18))
    for phase in PHASES:  # a rank that has to wait looks for signs of life, some bytes each
        assert more[phase].most_got < few[phase].most_got + SIGNS_BYTES, (phase, few, more)
        assert more[phase].got < 3 * few[phase].got + 18 * SIGNS_BYTES, (phase, few, more)
        assert more[phase].put < 3 * few[phase].put + 18 * SIGNS_BYTES, (phase, few, more)


@pytest.mark.slow
def test_meetings_of_a_thousand_ranks(tmp_path):
    """Under a second of processor and 100 MB for a rank, rank 0 included; a few MB through the
    store in all.
    """
    found = crowd(1024, tmp_path / "many", "meetings", timeout=500)
    for phase in PHASES:
        figures = found[phase]
        assert max(figures.leader_seconds, figures.rank_seconds) < 1, (phase, figures)
        assert 0 < figures.leader_peak < 100 << 20, (phase, figures)
        assert figures.most_got < 4096, (phase, figures)
        assert figures.put + figures.got < 16 << 20, (phase, figures)


def meeting(coming, of=MANY, **given):
    """What a meeting of the ranks `coming`, each a thread, comes to for each of them; `given` to
    each by its number.
    """
    store = HashStore()
    everybody = {rank: Ranks(rank, of, store, timeout_seconds=2.0) for rank in range(of)}

    def meet(rank):
        try:
            own = {name: of_rank(rank) for name, of_rank in given.items()}
            return everybody[rank].agree("it", {"rank": rank}, **own)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(of) as pool:
        found = dict(zip(coming, pool.map(meet, coming), strict=True))
    return found, meet


def test_every_rank_is_told_what_rank_0_makes_of_all_values():
    found, _ = meeting(
        range(MANY), decide=lambda _: lambda values: sum(value["rank"] for value in values)
    )
    assert {agreed.result for agreed in found.values()} == {sum(range(MANY))}
    assert [value["rank"] for value in found[0].values] == [*range(MANY)]
    assert not any(agreed.values for rank, agreed in found.items() if rank)


def test_a_verdict_larger_than_a_value_of_the_store_arrives_whole():
    verdict = "x" * (9 << 20)
    found, _ = meeting(range(2), of=2, decide=lambda _: lambda _values: verdict)
    assert all(agreed.result == verdict for agreed in found.values())


def test_what_the_verdict_raises_is_raised_on_all():
    def refuse(_values):
        raise LoadError("these do not fit")

    found, _ = meeting(range(MANY), decide=lambda _: refuse)
    assert {(type(error), str(error)) for error in found.values()} == {
        (LoadError, "these do not fit")
    }


@pytest.mark.sample("1")
@pytest.mark.parametrize("missing", [1, MANY - 2])
def test_one_of_many_does_not_come(missing):
    """It is named on all, and told of it when it comes after all."""
    found, meet = meeting([rank for rank in range(MANY) if rank != missing])
    assert {type(error) for error in found.values()} == {RanksDisagreeError}
    assert all(f"rank(s) {missing} did not enter it" in str(error) for error in found.values()), (
        found
    )
    assert f"rank(s) {missing} did not enter it" in str(meet(missing))


def test_one_of_many_fails():
    found, _ = meeting(
        range(MANY), error=lambda rank: LoadError("odd") if rank == MANY - 3 else None
    )
    told = {type(error) for rank, error in found.items() if rank != MANY - 3}
    assert told == {RankError}
    assert all(
        f"rank {MANY - 3}" in str(error) for rank, error in found.items() if rank != MANY - 3
    )
