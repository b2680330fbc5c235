"""Scripts of the libraries' users, run as they are: plain, and with `infinity` as their DeepSpeed."""
