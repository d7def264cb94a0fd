"""Inject faults into whole clusters under traffic, and judge the recorded history.

| module   | contents                                                                                              |
|----------|-------------------------------------------------------------------------------------------------------|
| history  | the events of a run as JSON lines, written while they happen; the only module with that format        |
| traffic  | producers and consumers over the broker's HTTP data API; independent of faults                        |
| exchange | one request, and whether its outcome is ok, failed or unknown                                         |
| payloads | message payloads: chunks of real files                                                                |
| observed | a history as an index: messages, subscriptions, readings, faults                                      |
| validate | pure functions from a history to a verdict; independent of clusters                                   |
| verdict  | the kinds of errors, and the judgement of a run                                                       |
| figures  | gaps without a produce, latencies, and rates over time                                                |
| report   | a self-contained HTML page with a picture of the run, and a summary as text and JSON                  |
| picture  | the timeline as SVG                                                                                   |
"""
