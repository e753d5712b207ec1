"""The contract of a log, whichever backend keeps it: every promise of `headrace.log.api`, as tests.

A backend subclasses `LogContract`, gives an `address` fixture, and declares by attribute where it
differs.
"""

from tests.contract.groups_contract import GroupsContract
from tests.contract.queues_contract import QueuesContract
from tests.contract.reading_contract import ReadingContract
from tests.contract.topics_contract import TopicsContract
from tests.contract.transactions_contract import TransactionsContract
from tests.contract.writing_contract import WritingContract


class LogContract(
    TopicsContract,
    WritingContract,
    ReadingContract,
    TransactionsContract,
    GroupsContract,
    QueuesContract,
):
    """All of it."""
