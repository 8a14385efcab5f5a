# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys


def test_import_is_light_and_needs_no_neuron_package():
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import omni_neuron_runtime\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = {'vllm', 'vllm_omni', 'vllm_neuron', 'libtorch_neuronx_lite', 'nki', 'sympy', 'huggingface_hub'}\n"
        "assert not new & heavy, new & heavy\n"
        "assert len(set(sys.modules) - before) < 80, sorted(set(sys.modules) - before)\n"
        "assert all(hasattr(omni_neuron_runtime, name) for name in omni_neuron_runtime.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
