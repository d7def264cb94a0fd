"""Subscriptions of a topic: from the cursor and the dispatcher to the consumers' calls.

    subscription -> redelivery | acknowledging | explaining -> dispatch_loop -> reading -> consumer | oldest
        -> response_budget | decoding

| module          | owns                                                                         |
|-----------------|------------------------------------------------------------------------------|
| subscription    | the consumers' sessions and the counters; composes the others                |
| redelivery      | calls in progress by request id; returned messages                           |
| acknowledging   | nothing; translates message ids and keeps cursor and dispatcher consistent   |
| explaining      | nothing; says why a message is not delivered                                 |
| dispatch_loop   | the dispatcher, the calls that wait, the task that reads for them, the clock |
| reading         | the read position, the sizes of unfinished batches, the delayed messages     |
| consumer        | nothing; one call's limits, the filter of the subscription                   |
| oldest          | the age of the oldest unacknowledged message                                 |
| response_budget | the bytes of messages in responses, over all topics                          |
| decoding        | how many large entries are decoded at a time, over all topics                |
"""
