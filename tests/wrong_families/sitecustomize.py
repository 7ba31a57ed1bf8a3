"""Makes a family wrong in every process that starts with this folder on its path, as `WRONG_FAMILY` says.

"gemma2 attn_out=self_attn" changes a field, "cohere" alone takes the family away.
"""

import os

from families import spoil

if "WRONG_FAMILY" in os.environ:
    spoil(os.environ["WRONG_FAMILY"])
