"""What TaskRunner costs beside bare redis-py and beside other libraries, measured in one run.

`python -m benchmarks` is the command. The parent process (`__main__`, `workloads`, `harness`) runs
a private server and starts one child process per producer and per worker; a child (`child`,
`bodies`, `systems`) needs nothing but the standard library and the one library it measures, so that
it runs in that library's own environment.
"""
