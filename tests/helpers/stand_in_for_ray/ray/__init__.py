"""A stand-in for Ray on one machine: as much of it as docs/ray_train.py asks for."""
