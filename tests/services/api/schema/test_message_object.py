from services.api.schema.message_object import MessageUsage, OutputDetails, usage_of
from services.api.schema.replies import CompletionTokensDetails, PromptTokensDetails, Usage


def test_tokens_that_were_cached_are_counted_apart() -> None:
    usage = Usage(10, 3, 13, PromptTokensDetails(8), CompletionTokensDetails(1))
    assert usage_of(usage) == MessageUsage(2, 3, 0, 8, OutputDetails(1))
