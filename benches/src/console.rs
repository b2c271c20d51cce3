//! What the commands of the program `aquifer` share: the device that they run on, the progress
//! line, and how results are written.
//!
//! | module | contents |
//! |---|---|
//! | [`gpu`] | the driver of this machine's GPUs, if there is one |
//! | [`place`] | the selected device: a GPU, or the simulated one |
//! | [`progress`] | a progress line on the terminal |
//! | [`figures`] | counts and times as text, and the median |
//! | [`foreign`] | text of others on the terminal |
//! | [`layout`] | text in columns |
//! | [`json`] | JSON with fields in a chosen order |

pub mod figures;
pub mod foreign;
pub mod gpu;
pub mod json;
pub mod layout;
pub mod place;
pub mod progress;
