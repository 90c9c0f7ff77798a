#include "cli/bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace penstock::bench {
namespace {

constexpr double kWidth = 760, kHeight = 440;
constexpr double kLeft = 70, kRight = 190, kTop = 40, kBottom = 60;
constexpr std::array kColours{"#1b6ca8", "#7fb3d5", "#b03a2e", "#e6a49e", "#1e8449", "#8fc9a4"};

bool drawable(const std::pair<double, double>& point) {
  return std::isfinite(point.first) && std::isfinite(point.second) && point.first > 0 &&
         point.second > 0;
}

// One axis: where its ticks are and where a value stands between them.
struct Axis {
  double start = 0;  // pixels
  double end = 0;
  std::vector<double> ticks{};
  double base = 0;  // of a logarithmic axis, else 0
  double low = 0;
  double high = 1;

  // Whole powers of `base` around the data.
  void fit_powers(double of, double least, double most) {
    base = of;
    low = std::floor(std::log(least) / std::log(base) + 1e-9);
    high = std::max(low + 1, std::ceil(std::log(most) / std::log(base) - 1e-9));
    for (double tick = low; tick <= high; ++tick) ticks.push_back(std::pow(base, tick));
  }
  // From zero in four to ten steps of 1, 2 or 5 times a power of ten.
  void fit_from_zero(double most) {
    const double power = std::pow(10.0, std::floor(std::log10(most)));
    double step = power;
    for (const double factor : {0.5, 0.2}) {
      if (most / step < 4.0) step = power * factor;
    }
    high = std::ceil(most / step - 1e-9) * step;
    for (int i = 0; i * step <= high * (1 + 1e-9); ++i) ticks.push_back(i * step);
  }
  double at(double value) const {
    const double v = base > 0 ? std::log(value) / std::log(base) : value;
    return start + (v - low) / (high - low) * (end - start);
  }
};

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit < 3; ++unit) bytes /= 1024;
  return fmt::format("{:g} {}", bytes, units[unit]);
}

// Text between tags.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

PlotSeries& series_named(std::vector<PlotSeries>& series, std::string_view name) {
  auto known = std::find_if(series.begin(), series.end(),
                            [&](const PlotSeries& s) { return s.name == name; });
  if (known == series.end()) {
    known = series.insert(series.end(), PlotSeries{std::string(name), {}});
  }
  return *known;
}

std::string svg_of(const Plot& plot, const std::vector<PlotSeries>& series) {
  double x_least = 0, x_most = 0, y_least = 0, y_most = 0;
  bool any = false;
  for (const PlotSeries& s : series) {
    for (const auto& point : s.points) {
      if (!drawable(point)) continue;
      x_least = any ? std::min(x_least, point.first) : point.first;
      x_most = any ? std::max(x_most, point.first) : point.first;
      y_least = any ? std::min(y_least, point.second) : point.second;
      y_most = any ? std::max(y_most, point.second) : point.second;
      any = true;
    }
  }
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
      "{1}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" "
      "fill=\"white\"/>\n<text x=\"{2}\" y=\"24\" font-size=\"15\">{3}</text>\n",
      kWidth, kHeight, kLeft, escaped(plot.title));
  if (!any) return out + "</svg>\n";

  Axis x{kLeft, kWidth - kRight};
  Axis y{kHeight - kBottom, kTop};
  x.fit_powers(plot.x_unit == PlotUnit::kBytes ? 4 : 2, x_least, x_most);
  if (plot.y_scale == PlotScale::kLogarithmic) {
    y.fit_powers(10, y_least, y_most);
  } else {
    y.fit_from_zero(y_most);
  }
  for (const double value : x.ticks) {
    out += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\" stroke=\"#ddd\"/>\n<text "
        "x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\" font-size=\"10\">{4}</text>\n",
        x.at(value), kTop, kHeight - kBottom, kHeight - kBottom + 16,
        plot.x_unit == PlotUnit::kBytes ? bytes_text(value) : fmt::format("{:g}", value));
  }
  for (const double value : y.ticks) {
    out += fmt::format(
        "<line x1=\"{0}\" y1=\"{1:.1f}\" x2=\"{2}\" y2=\"{1:.1f}\" stroke=\"#ddd\"/>\n<text "
        "x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5:g}</text>\n",
        kLeft, y.at(value), kWidth - kRight, kLeft - 6, y.at(value) + 4, value);
  }
  for (std::size_t i = 0; i < series.size(); ++i) {
    const char* colour = kColours[i % kColours.size()];
    out +=
        fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"", colour);
    for (const auto& point : series[i].points) {
      if (drawable(point)) {
        out += fmt::format("{:.1f},{:.1f} ", x.at(point.first), y.at(point.second));
      }
    }
    const double row = kTop + 14 + 18 * static_cast<double>(i);
    out += fmt::format(
        "\"/>\n<line x1=\"{0}\" y1=\"{1}\" x2=\"{2}\" y2=\"{1}\" stroke=\"{3}\" "
        "stroke-width=\"2\"/>\n<text x=\"{4}\" y=\"{5}\">{6}</text>\n",
        kWidth - kRight + 12, row - 4, kWidth - kRight + 34, colour, kWidth - kRight + 40, row,
        escaped(series[i].name));
  }
  return out + fmt::format(
                   "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n<text "
                   "transform=\"translate(18 {:.1f}) rotate(-90)\" "
                   "text-anchor=\"middle\">{}</text>\n</svg>\n",
                   (kLeft + kWidth - kRight) / 2, kHeight - 16, escaped(plot.x_label),
                   (kTop + kHeight - kBottom) / 2, escaped(plot.y_label));
}

}  // namespace penstock::bench
