# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import omni_neuron_nkisim

# Before the kernels beside the tests are imported; where a real nki imports, the same tests run on it.
omni_neuron_nkisim.install()
sys.path.insert(0, str(Path(__file__).parent))
