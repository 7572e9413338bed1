"""Names of the constructor arguments of SageMaker's SDK 2.257.7; tests/launch/third_party/test_sdk.py compares them."""

_ALL = """
base_job_name checkpoint_local_path checkpoint_s3_uri code_location container_arguments container_entry_point
container_log_level debugger_hook_config dependencies disable_output_compression disable_profiler enable_infra_check
enable_network_isolation enable_remote_debug enable_sagemaker_metrics enable_session_tag_chaining
encrypt_inter_container_traffic entry_point environment git_config hyperparameters image_uri input_mode instance_count
instance_groups instance_placement_config instance_type keep_alive_period_in_seconds max_retry_attempts max_run
max_wait metric_definitions model_channel_name model_uri output_kms_key output_path profiler_config role rules
sagemaker_session security_group_ids source_dir subnets tags tensorboard_output_config training_plan
training_repository_access_mode training_repository_credentials_provider_arn use_spot_instances volume_kms_key
volume_size
""".split()
_OWN = {
    "PyTorch": "compiler_config distribution framework_version py_version recipe_overrides training_recipe",
    "TensorFlow": "compiler_config distribution framework_version model_dir py_version",
    "HuggingFace": "compiler_config distribution py_version pytorch_version tensorflow_version transformers_version",
}
SDK_ARGUMENTS = {kind: sorted([*_ALL, *names.split()]) for kind, names in _OWN.items()}
