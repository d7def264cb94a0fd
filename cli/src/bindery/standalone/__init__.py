"""`bindery standalone`: a whole cluster on one machine, as separate processes with one supervisor.

| module      | what it holds                                                                    |
|-------------|----------------------------------------------------------------------------------|
| options     | what the command line asked for                                                  |
| plan        | which processes, with which commands, ports and data: pure                       |
| directory   | the data directory: who holds it, pid and log files, what was stopped by name    |
| process     | one child: started, probed, watched, stopped                                     |
| supervisor  | all of them: order, restarts, shutdown                                           |
| control     | the socket through which `status`, `stop` and `start` reach a running supervisor |
| commands    | the verbs of the command line                                                    |
| throwaway   | a cluster for one test or demonstration, gone at its end                         |
"""
