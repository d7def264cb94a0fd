"""`bindery standalone`: a cluster on one machine, as separate processes with one supervisor.

| module      | content                                                                          |
|-------------|----------------------------------------------------------------------------------|
| options     | options of the command line                                                      |
| plan        | processes of the cluster with their commands, ports and data; pure               |
| secured     | secrets and settings of a cluster with TLS, authentication and authorization     |
| directory   | the data directory: its lock, pid and log files, state file                      |
| process     | one child process: start, probes, end                                            |
| supervisor  | all child processes: order, restarts, shutdown                                   |
| control     | the socket through which `status`, `stop` and `start` reach a running supervisor |
| commands    | the commands `standalone`, `status`, `stop` and `start`                          |
| throwaway   | a cluster for one test or demonstration, removed at the end                      |
"""
