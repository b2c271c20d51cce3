//! The shapes of a picture, and its SVG.
//!
//! Shapes are kept until all are known. The picture is then made as large as they need, so no text
//! can be outside of it.

use super::label::columns;
use plotters::{
    backend::{DrawingBackend, SVGBackend},
    style::{
        FontDesc, FontFamily, FontStyle, RGBColor, ShapeStyle, TextStyle,
        text_anchor::{HPos, Pos, VPos},
    },
};

/// Pixels around the picture.
pub(super) const MARGIN: i32 = 16;
/// Pixels of a line of text.
pub(super) const LINE: i32 = 16;
/// Pixels of the font, plain and in titles.
const FONT: f64 = 12.0;
const TITLE: f64 = 14.0;
/// What plotters divides the size of a font by.
const PLOTTERS: f64 = 1.24;
/// Pixels between two lines of a hatching.
const HATCH: usize = 6;
/// The width of a column of text over the font's size. Monospaced fonts have 0.55 to 0.61.
const COLUMN: f64 = 0.625;

const PAPER: RGBColor = RGBColor(255, 255, 255);
/// Text.
pub(super) const INK: RGBColor = RGBColor(26, 26, 26);
/// Lines of the axes.
pub(super) const GRID: RGBColor = RGBColor(216, 216, 216);
/// Bars of this library.
pub(super) const OWN: RGBColor = RGBColor(0, 90, 160);
/// Bars and curves of peers.
pub(super) const PEER: RGBColor = RGBColor(105, 105, 105);

/// How text is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Style {
    Plain,
    /// Bold.
    Strong,
    /// Larger and bold.
    Title,
}

impl Style {
    fn size(self) -> f64 {
        if self == Self::Title { TITLE } else { FONT }
    }

    /// Returns it in plotters' terms.
    fn with(self, anchor: HPos) -> TextStyle<'static> {
        let weight = if self == Self::Plain { FontStyle::Normal } else { FontStyle::Bold };
        let font = FontDesc::new(FontFamily::Monospace, self.size() * PLOTTERS, weight);
        TextStyle::from(font).color(&INK).pos(Pos::new(anchor, VPos::Center))
    }

    /// Returns the pixels that text of this style needs at most.
    pub(super) fn width(self, text: &str) -> i32 {
        (columns(text) as f64 * self.size() * COLUMN).ceil() as i32
    }
}

/// The mark of a curve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mark {
    Disc,
    Square,
    Triangle,
    Diamond,
    Ring,
    Frame,
    Cross,
    Plus,
}

/// The marks of curves, in order.
pub(super) const MARKS: [Mark; 8] = [
    Mark::Disc,
    Mark::Square,
    Mark::Triangle,
    Mark::Diamond,
    Mark::Ring,
    Mark::Frame,
    Mark::Cross,
    Mark::Plus,
];

/// A position in pixels from the upper left.
type Point = (i32, i32);

/// A shape, in the order of drawing.
enum Shape {
    Area(Vec<Point>, RGBColor),
    Stroke(Vec<Point>, RGBColor, u32),
    Circle { centre: Point, colour: RGBColor, is_filled: bool },
    Text { at: Point, text: String, style: Style, anchor: HPos },
}

/// A picture that is being drawn.
#[derive(Default)]
pub(super) struct Drawing {
    shapes: Vec<Shape>,
    width: i32,
    height: i32,
}

impl Drawing {
    /// Writes text to the right of a place, centred on `y`.
    pub(super) fn text(&mut self, x: i32, y: i32, text: &str, style: Style) {
        self.reach(x + style.width(text), y + LINE / 2);
        let text = text.to_owned();
        self.shapes.push(Shape::Text { at: (x, y), text, style, anchor: HPos::Left });
    }

    /// Writes text around a place, or as near to it as the margin on the left allows.
    pub(super) fn centred(&mut self, x: i32, y: i32, text: &str) {
        let half = Style::Plain.width(text) / 2 + 1;
        let x = x.max(MARGIN + half);
        self.reach(x + half, y + LINE / 2);
        let (text, style) = (text.to_owned(), Style::Plain);
        self.shapes.push(Shape::Text { at: (x, y), text, style, anchor: HPos::Center });
    }

    /// Fills a rectangle.
    pub(super) fn area(&mut self, (left, top): Point, (right, bottom): Point, colour: RGBColor) {
        self.reach(right, bottom);
        let corners = vec![(left, top), (right, top), (right, bottom), (left, bottom)];
        self.shapes.push(Shape::Area(corners, colour));
    }

    /// Draws a rectangle and hatches it.
    pub(super) fn hatched(&mut self, (left, top): Point, (right, bottom): Point, colour: RGBColor) {
        let frame = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
        self.path(&frame, colour, 1);
        // One line to and fro under 45 degrees, joined along the frame.
        let height = bottom - top;
        let mut line = Vec::new();
        for (at, foot) in (left..=right - height).step_by(HATCH).enumerate() {
            let (low, high) = ((foot, bottom), (foot + height, top));
            line.extend(if at % 2 == 0 { [low, high] } else { [high, low] });
        }
        if !line.is_empty() {
            self.path(&line, colour, 1);
        }
    }

    /// Draws a line through points.
    pub(super) fn path(&mut self, points: &[Point], colour: RGBColor, width: u32) {
        points.iter().for_each(|&(x, y)| self.reach(x, y));
        self.shapes.push(Shape::Stroke(points.to_vec(), colour, width));
    }

    /// Draws a dashed line through points. The dashes go on around corners.
    pub(super) fn dashed(&mut self, points: &[Point], colour: RGBColor) {
        const DASH: f64 = 5.0;
        let mut walked = 0.0;
        for pair in points.windows(2) {
            let [(x0, y0), (x1, y1)] = [pair[0], pair[1]];
            let (dx, dy) = (f64::from(x1 - x0), f64::from(y1 - y0));
            let length = dx.hypot(dy);
            let at = |way: f64| {
                let share = (way / length).clamp(0.0, 1.0);
                (x0 + (dx * share).round() as i32, y0 + (dy * share).round() as i32)
            };
            // Each dash is one length of a cycle of two.
            let mut begin = -(walked % (2.0 * DASH));
            while begin < length {
                if begin + DASH > 0.0 {
                    self.path(&[at(begin.max(0.0)), at((begin + DASH).min(length))], colour, 1);
                }
                begin += 2.0 * DASH;
            }
            walked += length;
        }
    }

    /// Draws the mark of a curve.
    pub(super) fn mark(&mut self, (x, y): Point, mark: Mark, colour: RGBColor) {
        const R: i32 = 4;
        self.reach(x + R, y + R);
        let mut area = |points: &[Point]| self.shapes.push(Shape::Area(points.to_vec(), colour));
        match mark {
            Mark::Square => area(&[(x - R, y - R), (x + R, y - R), (x + R, y + R), (x - R, y + R)]),
            Mark::Triangle => area(&[(x, y - R - 1), (x + R + 1, y + R), (x - R - 1, y + R)]),
            Mark::Diamond => {
                area(&[(x, y - R - 1), (x + R + 1, y), (x, y + R + 1), (x - R - 1, y)]);
            }
            Mark::Disc | Mark::Ring => {
                let is_filled = mark == Mark::Disc;
                self.shapes.push(Shape::Circle { centre: (x, y), colour, is_filled });
            }
            Mark::Frame => {
                let [left, top, right, bottom] = [x - R, y - R, x + R, y + R];
                let round =
                    [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)];
                self.path(&round, colour, 2);
            }
            Mark::Cross => {
                self.path(&[(x - R, y - R), (x + R, y + R)], colour, 2);
                self.path(&[(x - R, y + R), (x + R, y - R)], colour, 2);
            }
            Mark::Plus => {
                self.path(&[(x - R, y), (x + R, y)], colour, 2);
                self.path(&[(x, y - R), (x, y + R)], colour, 2);
            }
        }
    }

    fn reach(&mut self, x: i32, y: i32) {
        self.width = self.width.max(x);
        self.height = self.height.max(y);
    }

    /// Returns the picture.
    pub(super) fn to_svg(&self) -> String {
        let mut svg = String::new();
        let size = (self.width + MARGIN, self.height + MARGIN);
        let mut to = SVGBackend::with_string(&mut svg, (size.0 as u32, size.1 as u32));
        let filled = |colour: RGBColor| ShapeStyle::from(&colour).filled();
        // Nothing is written but memory until `present`, and nothing then, so no error can happen.
        let _ = to.draw_rect((0, 0), size, &filled(PAPER), true);
        for shape in &self.shapes {
            let _ = match shape {
                Shape::Area(corners, colour) => {
                    to.fill_polygon(corners.iter().copied(), &filled(*colour))
                }
                Shape::Stroke(points, colour, width) => {
                    let style = ShapeStyle::from(colour).stroke_width(*width);
                    to.draw_path(points.iter().copied(), &style)
                }
                Shape::Circle { centre, colour, is_filled } => {
                    let style = ShapeStyle::from(colour).stroke_width(2);
                    to.draw_circle(*centre, 4, &style, *is_filled)
                }
                Shape::Text { at, text, style, anchor } => {
                    to.draw_text(text, &style.with(*anchor), *at)
                }
            };
        }
        let _ = to.present();
        drop(to);
        svg
    }
}
