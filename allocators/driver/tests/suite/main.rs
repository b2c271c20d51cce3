//! The tests of this crate that can share one process.

#[macro_use]
mod sim_fixtures;

mod forks;
mod sim_codes;
mod sim_driver;
mod sim_ends;
mod sim_export;
mod sim_faults;
mod sim_graph_faults;
mod sim_graphs;
mod sim_model;
mod sim_modes;
mod sim_reports;
mod sim_silence;
