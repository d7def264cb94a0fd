"""Break whole clusters on purpose, and decide from the recorded history who was right.

| module   | is                                                                                                    |
|----------|-------------------------------------------------------------------------------------------------------|
| history  | what happened, as JSON lines written while it happens; nothing else knows that format                 |
| traffic  | producers and consumers over the broker's HTTP data API; knows nothing of faults                      |
| exchange | one request, and whether its outcome is ok, failed or unknown                                         |
| payloads | real data: chunks of files                                                                            |
| observed | a history put together: messages, subscriptions, readings, faults                                     |
| validate | pure functions from a history to a verdict; knows nothing of clusters                                 |
| verdict  | what can be wrong, and how a judgement says so                                                        |
| figures  | gaps, latencies and the seconds of a run                                                              |
| report   | a self-contained HTML page with a picture of the run, and a summary as text and JSON                  |
| picture  | the timeline as SVG                                                                                   |
"""
