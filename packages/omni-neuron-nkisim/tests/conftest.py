# SPDX-License-Identifier: Apache-2.0
import omni_neuron_nkisim

# Before the kernels beside the tests are imported; where a real nki imports, the same tests run on it.
omni_neuron_nkisim.install()
