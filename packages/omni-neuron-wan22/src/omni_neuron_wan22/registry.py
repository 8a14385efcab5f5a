# SPDX-License-Identifier: Apache-2.0
"""What this distribution registers with vLLM-Omni; the entry point `vllm_omni_neuron.models` names this module.

Importing it imports no model code: that happens when vLLM-Omni resolves the pipeline.
"""

PIPELINE_REGISTRY = [
    {
        "model_arch": "WanPipeline",
        "module_name": "omni_neuron_wan22.pipeline",
        "class_name": "NeuronWanPipeline",
        "pre_process_func_name": "get_neuron_wan22_pre_process_func",
        "post_process_func_name": "get_neuron_wan22_post_process_func",
    },
    {
        "model_arch": "WanImageToVideoPipeline",
        "module_name": "omni_neuron_wan22.pipeline_i2v",
        "class_name": "NeuronWanI2VPipeline",
        "pre_process_func_name": "get_neuron_wan22_pre_process_func",
        "post_process_func_name": "get_neuron_wan22_post_process_func",
    },
]

# What each is made of and supports, for the runner, the command line and the conformance kit.
MODEL_SPECS = {
    "WanPipeline": "omni_neuron_wan22.spec:T2V",
    "WanImageToVideoPipeline": "omni_neuron_wan22.spec:I2V",
}
SDK = 1
