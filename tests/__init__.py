"""The tests, in folders as in `mmstream`."""

import os

# Threads of torch that wait for each other spin, and keep other processes from two busy cores: a
# test of 5 s takes 45 s then. OpenMP reads this when it is loaded; child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
