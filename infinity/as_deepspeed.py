"""From this import on, ``import deepspeed`` is `infinity.deepspeed`, for this process and the scripts and libraries in it.

    import infinity.as_deepspeed  # the first line of a script

or, without a change to the script, ``python -m infinity.as_deepspeed train.py --deepspeed ds_config.json``. Nothing else
makes `infinity` answer to that name.
"""

import sys

from infinity.deepspeed.stand_in import SITE, install, run

# At import, because a script's next line is `import deepspeed`. Raises LibraryError if the real DeepSpeed is loaded,
# or accelerate has already looked for it.
install()

if __name__ == "__main__":
    run(sys.argv[1:])

__all__ = ["SITE", "install"]
