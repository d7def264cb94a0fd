"""Subscriptions of a topic: from the cursor and the dispatcher to the consumers' calls.

    subscription -> redelivery | acknowledging -> dispatch_loop -> reading -> consumer -> response_budget | decoding

| module          | owns                                                                         |
|-----------------|------------------------------------------------------------------------------|
| subscription    | the consumers' sessions and the counters; composes the others                |
| redelivery      | calls in progress by request id; returned messages                           |
| acknowledging   | nothing; translates message ids and keeps cursor and dispatcher consistent   |
| dispatch_loop   | the dispatcher, the queue of waiting calls, the clock                        |
| reading         | the read position and the sizes of unfinished batches                        |
| consumer        | nothing; one call's limits, the subscription's tag filter                    |
| response_budget | the bytes of messages in responses, over all topics                          |
| decoding        | how many large entries are decoded at a time, over all topics                |
"""
