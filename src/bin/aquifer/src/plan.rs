//! `aquifer plan`: places the blocks of a trace.

use crate::{
    cli::PlanArgs,
    error::CommandError,
    output::{self, WIDTH, row},
};
use aquifer_benches::console::{
    figures::{Count, Of},
    json,
    layout::clip_middle,
    progress::ProgressLine,
};
use aquifer_core::Bytes;
use aquifer_formats::plan::{Plan, PlanBlock, PlanOptions};
use aquifer_formats::trace::Trace;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The result of the command.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PlanReport {
    trace: String,
    blocks: u64,
    streams: u64,
    peak_live: u64,
    lower_bound: u64,
    top: u64,
    edges: u64,
    seconds: f64,
    limit: Option<u64>,
    /// The file that was written.
    file: Option<String>,
    /// What the reader of the trace left out.
    pub(crate) notes: Vec<String>,
}

/// Runs the `plan` command.
///
/// # Errors
/// [`CommandError`]. The file is then as it was before.
pub(crate) fn run(args: &PlanArgs) -> Result<PlanReport, CommandError> {
    let path = || args.trace.clone();
    if let Some(output) = &args.output
        && output::is_same_file(output, &args.trace)
    {
        return Err(CommandError::OutputIsInput(output.clone()));
    }
    let mut progress = ProgressLine::on_terminal();
    progress.phase("reading the trace");
    let trace =
        Trace::read(&args.trace, args.device_index).map_err(CommandError::in_trace(&args.trace))?;
    if trace.devices.len() > 1 && args.device_index.is_none() {
        return Err(CommandError::SeveralDevices { path: path(), devices: trace.devices });
    }
    if args.check && trace.unreadable > 0 {
        return Err(CommandError::Unread { path: path(), rows: trace.unreadable });
    }
    progress.phase("planning");
    let mut options = PlanOptions::default();
    if let Some(seconds) = args.seconds {
        options.time = Duration::from_secs(seconds.into());
        options.tries = u32::MAX;
    }
    let begun = Instant::now();
    let plan = Plan::make(&PlanBlock::of_trace(&trace), &options)
        .map_err(|error| CommandError::Blocks { path: path(), error })?;
    let seconds = begun.elapsed().as_secs_f64();
    if let Some(file) = &args.output {
        progress.phase("writing");
        output::write_whole(file, |out| plan.write_to(out))
            .map_err(|e| CommandError::Output(file.clone(), e))?;
    }
    progress.clear();
    Ok(PlanReport {
        trace: args.trace.display().to_string(),
        blocks: plan.blocks().len() as u64,
        streams: trace.streams.into(),
        peak_live: trace.peak_live,
        lower_bound: plan.lower_bound(),
        top: plan.top(),
        edges: plan.edges().len() as u64,
        seconds,
        limit: args.limit.map(|limit| limit.bytes(trace.peak_live)),
        file: args.output.as_ref().map(|file| file.display().to_string()),
        notes: trace.notes,
    })
}

impl PlanReport {
    /// Returns whether the plan fits into the limit, if there is one.
    pub(crate) fn fits(&self) -> bool {
        self.limit.is_none_or(|limit| self.top <= limit)
    }

    /// Returns the result as JSON. `spare_bytes` is below zero if the plan does not fit.
    pub(crate) fn to_json(&self) -> String {
        let mut fields: Vec<(&str, Value)> = vec![
            ("trace", json!(self.trace)),
            ("blocks", json!(self.blocks)),
            ("streams", json!(self.streams)),
            ("peak_live_bytes", json!(self.peak_live)),
            ("lower_bound_bytes", json!(self.lower_bound)),
            ("top_bytes", json!(self.top)),
            ("edges", json!(self.edges)),
            ("seconds", json!((self.seconds * 1e6).round() / 1e6)),
            ("file", json!(self.file)),
            ("notes", json!(self.notes)),
        ];
        if let Some(limit) = self.limit {
            fields.push(("limit_bytes", json!(limit)));
            fields.push(("fits", json!(self.fits())));
            // A top is below 2^41.
            let spare = i128::from(limit) - i128::from(self.top);
            fields.push(("spare_bytes", json!(i64::try_from(spare).unwrap_or(i64::MAX))));
        }
        json::object(&fields)
    }

    /// Returns the screen, without a newline after the last line.
    pub(crate) fn to_screen(&self) -> String {
        let label = "aquifer plan  ";
        let mut lines = vec![
            format!("{label}{}", clip_middle(&self.trace, WIDTH - label.len())),
            String::new(),
        ];
        let over = |bytes: u64, of: u64| format!("{:.4} x", bytes as f64 / of.max(1) as f64);
        let streams = Of(self.streams, "stream");
        let reuse = match self.edges {
            0 => "no reuse that a stream has to wait for".to_owned(),
            edges => format!("{} between streams", Of(edges, "edge")),
        };
        row(&mut lines, "blocks", &Count(self.blocks).to_string(), &format!("{streams}, {reuse}"));
        let mut bytes = |name, bytes, remark: &str| {
            row(&mut lines, name, &Bytes(bytes).to_string(), remark);
        };
        let exact = |of| format!("{} bytes", Count(of));
        bytes("peak live", self.peak_live, &format!("{}, as requested", exact(self.peak_live)));
        bytes(
            "lower bound",
            self.lower_bound,
            &format!("{}, in units of 512", exact(self.lower_bound)),
        );
        let times = over(self.top, self.lower_bound);
        bytes("plan", self.top, &format!("{}, {times} the lower bound", exact(self.top)));
        if let Some(limit) = self.limit {
            let (figure, remark) = if self.fits() {
                ("yes", format!("{} to spare of {}", Bytes(limit - self.top), Bytes(limit)))
            } else {
                let missing = Bytes(self.top - limit);
                // What no plan can do is not a matter of searching longer.
                let hope = if self.lower_bound > limit {
                    "no plan fits: the lower bound is above it"
                } else {
                    "the lower bound would fit: --seconds searches longer"
                };
                ("no", format!("{missing} above {}; {hope}", Bytes(limit)))
            };
            row(&mut lines, "fits", figure, &remark);
        }
        row(&mut lines, "search", &format!("{:.2} s", self.seconds), "");
        if let Some(file) = &self.file {
            row(&mut lines, "written", "", &clip_middle(file, WIDTH - 32));
        } else {
            row(&mut lines, "written", "no", "-o FILE writes it");
        }
        lines.join("\n")
    }
}
