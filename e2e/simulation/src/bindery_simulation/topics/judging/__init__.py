"""Judge the recorded history of a run with brokers. Pure: no simulation, no product code.

    judge -> completeness | delivery | ownership -> facts -> history

| module         | content                                                                       |
|----------------|-------------------------------------------------------------------------------|
| `history`      | requests, calls and events, as they are recorded                              |
| `facts`        | an index of a history: messages, acknowledgements, seeks, life of subscriptions |
| `delivery`     | rules about what a consumer receives, and when                                |
| `ownership`    | rules about brokers that lost a topic                                         |
| `completeness` | rules about what every subscription must receive                              |
| `judge`        | the names of all invariants, and the verdict                                  |
"""
