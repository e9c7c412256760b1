"""Answers from running servers: what is asked (`api`), of whom (`server`, `identity`), by whom (`pool`, `run`)."""
