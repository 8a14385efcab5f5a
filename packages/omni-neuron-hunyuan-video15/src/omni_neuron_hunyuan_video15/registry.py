# SPDX-License-Identifier: Apache-2.0
"""What this distribution registers with vLLM-Omni; the entry point `vllm_omni_neuron.models` names this module.

Importing it imports no model code: that happens when vLLM-Omni resolves the pipeline.
"""

PIPELINE_REGISTRY = [
    {
        "model_arch": "HunyuanVideo15Pipeline",
        "module_name": "omni_neuron_hunyuan_video15.pipeline",
        "class_name": "NeuronHunyuanVideo15Pipeline",
        "pre_process_func_name": "get_hunyuan_video15_pre_process_func",
        "post_process_func_name": "get_hunyuan_video15_post_process_func",
    },
]
MODEL_SPECS = {"HunyuanVideo15Pipeline": "omni_neuron_hunyuan_video15.spec:SPEC"}
SDK = 1
