"""io_uring: many transfers in flight from one thread. Needs the wheel ``liburing``."""
