// Curves over a logarithmic x axis as SVG text: enough to see a curve, no more.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::bench {

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x and y > 0
};

// The series of that name, made at the end if there is none.
PlotSeries& series_named(std::vector<PlotSeries>& series, std::string_view name);

enum class PlotUnit { kBytes, kNumber };           // of x: 64 KiB, or 65536
enum class PlotScale { kLogarithmic, kFromZero };  // of y

struct Plot {
  std::string title;
  std::string x_label;
  std::string y_label;
  PlotUnit x_unit = PlotUnit::kNumber;
  PlotScale y_scale = PlotScale::kLogarithmic;
};

// A whole SVG document. Points that are not positive and finite are left out.
std::string svg_of(const Plot& plot, const std::vector<PlotSeries>& series);

}  // namespace penstock::bench
