"""The check whether this broker still owns the topic."""

import asyncio

import pytest
from bindery_broker.managed_ledger.ownership_proof import OwnershipProof
from bindery_core.errors import MetadataUnavailable, TryAgain


@pytest.mark.parametrize("answer", [True, False])
async def test_the_answer_of_the_store_decides(answer: bool) -> None:
    async def check() -> bool:
        return answer

    proof = OwnershipProof(check, timeout_s=1)
    assert proof.is_possible
    assert await proof.holds() is answer


async def test_without_a_check_the_topic_counts_as_lost() -> None:
    proof = OwnershipProof(None, timeout_s=1)
    assert not proof.is_possible
    assert await proof.holds() is False


async def test_an_error_of_the_store_is_no_answer() -> None:
    async def check() -> bool:
        raise MetadataUnavailable("made up")

    with pytest.raises(MetadataUnavailable, match="made up"):
        await OwnershipProof(check, timeout_s=1).holds()


async def test_a_store_that_does_not_answer_raises_at_the_time_limit() -> None:
    async def check() -> bool:
        await asyncio.get_running_loop().create_future()
        return True

    began = asyncio.get_running_loop().time()
    with pytest.raises(TryAgain, match="could not determine the owner of the topic in time"):
        await OwnershipProof(check, timeout_s=4).holds()
    assert asyncio.get_running_loop().time() == began + 4
