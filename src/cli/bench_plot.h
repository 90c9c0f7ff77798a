// Curves on two logarithmic axes as SVG text: enough to see a size curve, no more.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::cli {

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x and y > 0
};

// A whole SVG document. Points that are not positive and finite are left out.
std::string log_log_svg(std::string_view title, std::string_view x_label, std::string_view y_label,
                        const std::vector<PlotSeries>& series);

}  // namespace penstock::cli
