from common.protocol import Finished, FinishReason
from services.scheduler.book import Book
from services.scheduler.events import SendTokens, WorkerFault


def test_effects_come_out_once_and_in_order() -> None:
    book = Book()
    book.effects.append(WorkerFault("first"))
    book.outbox.finish(Finished(5, FinishReason.ABORT))
    kept = book.effects
    first, second = book.drain()
    assert first == WorkerFault("first") and isinstance(second, SendTokens)
    assert book.drain() == [] and book.effects is kept  # cores hold on to the list
