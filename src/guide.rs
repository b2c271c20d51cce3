#![doc = include_str!("guide/guide.md")]

#[doc = include_str!("guide/first_steps.md")]
pub mod first_steps {}

#[doc = include_str!("guide/cookbook.md")]
pub mod cookbook {}

#[doc = include_str!("guide/choosing.md")]
pub mod choosing {}

#[doc = include_str!("guide/streams_and_kernels.md")]
pub mod streams_and_kernels {}

#[doc = include_str!("guide/host_memory.md")]
pub mod host_memory {}

#[doc = include_str!("guide/collections_and_arenas.md")]
pub mod collections_and_arenas {}

#[doc = include_str!("guide/custom_structs.md")]
pub mod custom_structs {}

#[doc = include_str!("guide/errors.md")]
pub mod errors {}

#[doc = include_str!("guide/limits.md")]
pub mod limits {}

#[doc = include_str!("guide/kv_server.md")]
pub mod kv_server {}

#[doc = include_str!("guide/asynchronous.md")]
pub mod asynchronous {}

#[doc = include_str!("guide/graphs.md")]
pub mod graphs {}

#[doc = include_str!("guide/own_memory.md")]
pub mod own_memory {}

#[doc = include_str!("guide/without_a_gpu.md")]
pub mod without_a_gpu {}

#[doc = include_str!("guide/testing_in_ci.md")]
pub mod testing_in_ci {}

#[doc = include_str!("guide/safety.md")]
pub mod safety {}

#[doc = include_str!("guide/report.md")]
pub mod report {}

#[doc = include_str!("guide/planning.md")]
pub mod planning {}

#[doc = include_str!("guide/watching.md")]
pub mod watching {}

#[doc = include_str!("guide/sharing.md")]
pub mod sharing {}

#[doc = include_str!("guide/status.md")]
pub mod status {}

#[doc = include_str!("guide/tuning.md")]
pub mod tuning {}

#[doc = include_str!("guide/troubleshooting.md")]
pub mod troubleshooting {}

#[doc = include_str!("guide/environment.md")]
pub mod environment {}

#[doc = include_str!("guide/from_cudarc.md")]
pub mod from_cudarc {}

#[doc = include_str!("guide/from_rmm.md")]
pub mod from_rmm {}

#[doc = include_str!("guide/from_pytorch.md")]
pub mod from_pytorch {}

#[doc = include_str!("guide/c_and_python.md")]
pub mod c_and_python {}

#[doc = include_str!("guide/frameworks.md")]
pub mod frameworks {}

#[doc = include_str!("guide/torchrun.md")]
pub mod torchrun {}

#[doc = include_str!("guide/ray.md")]
pub mod ray {}

#[doc = include_str!("guide/comparison.md")]
pub mod comparison {}

#[doc = include_str!("guide/features.md")]
pub mod features {}

#[cfg_attr(doc, doc = include_str!("guide/pictures/definitions.txt"))]
#[doc = include_str!("guide/any_program.md")]
pub mod any_program {}

#[doc = include_str!("guide/support.md")]
pub mod support {}

// The pictures by their data: the pages of rustdoc do not lie beside the files, to which the links
// of the page itself lead.
#[cfg_attr(doc, doc = include_str!("guide/pictures/definitions.txt"))]
#[doc = include_str!("guide/figures.md")]
pub mod figures {}

#[doc = include_str!("guide/yardsticks.md")]
pub mod yardsticks {}

#[doc = include_str!("guide/glossary.md")]
pub mod glossary {}

pub mod inside;
